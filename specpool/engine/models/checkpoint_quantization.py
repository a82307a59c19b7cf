"""Decides which quantized checkpoints are supported."""

from copy import deepcopy
from typing import Any

from transformers import PreTrainedConfig

from specpool.engine.models.packed_formats import PACKED_FORMATS, PackedFormat

HINT = "serve the unquantized model instead, or a GGUF file"
DRAFT_METHOD = "specpool"  # `quant_method` in the configuration of a trained draft
# Name endings of tensors with the scales of quantized weights.
SCALES = ("scale", "scale_inv", "scales", "qscale_weight", "SCB")


def why_unsupported_quantization(config: PreTrainedConfig) -> str | None:
    """Return why a model's quantized weights cannot be served; None if they can, or if there are none."""
    try:
        format_of(config)
    except ValueError as error:
        return f"this {config.model_type} model is quantized by {error}, which is not supported; {HINT}"
    return None


def format_of(config: PreTrainedConfig) -> PackedFormat | None:
    """Return the packed format of a model; None if it is not quantized or is a trained draft.

    Raises ValueError, naming the unsupported method or field.
    """
    quantization, method = _quantization(config), method_of(config)
    if quantization is None or method in (None, DRAFT_METHOD):
        return None
    if method not in PACKED_FORMATS:
        raise ValueError(method)
    try:
        return PACKED_FORMATS[method](quantization)
    except ValueError as error:
        raise ValueError(f"{method} with {error}") from error


def without_quantization(config: PreTrainedConfig) -> PreTrainedConfig:
    """Return a copy of the configuration for a model whose weights are already dequantized."""
    plain = deepcopy(config)
    for part in (plain, plain.get_text_config(decoder=True)):
        if hasattr(part, "quantization_config"):
            del part.quantization_config
    return plain


def method_of(config: PreTrainedConfig) -> str | None:
    """Return the quantization method that the configuration names; None if the model is not quantized."""
    quantization = _quantization(config)
    if quantization is None:
        return None
    if quantization.get("load_in_4bit") or quantization.get("load_in_8bit"):
        return "bitsandbytes"
    return str(quantization.get("quant_method") or "an unnamed method")


def is_scale(name: str) -> bool:
    return name.endswith(SCALES)


def _quantization(config: PreTrainedConfig) -> dict[str, Any] | None:
    for part in (config, config.get_text_config(decoder=True)):
        quantization: dict[str, Any] | None = getattr(part, "quantization_config", None)
        if quantization is not None:
            return quantization
    return None
