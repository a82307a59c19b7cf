"""Quantized checkpoints: which ones are supported, and how transformers dequantizes them."""

from typing import Any

from transformers import FineGrainedFP8Config, GgufConfig, PreTrainedConfig

from specpool.engine.sharding.shares import head_dim_of

HINT = "serve the unquantized model instead, or a GGUF file"
DRAFT_METHOD = "specpool"  # `quant_method` in the configuration of a trained draft
# Name endings of tensors with the scales of quantized weights.
SCALES = ("scale", "scale_inv", "scales", "qscale_weight", "SCB")


def why_unsupported_quantization(config: PreTrainedConfig) -> str | None:
    """Return why a model's quantized weights cannot be served; None if they can, or if there are none."""
    quantization = _quantization(config)
    if quantization is None:
        return None
    method, model = method_of(config), f"this {config.model_type} model is quantized"
    if method == DRAFT_METHOD:
        return None
    if method != "fp8":
        return f"{model} by {method}, which is not supported; {HINT}"
    block: Any = quantization.get("weight_block_size")
    by_block = _is_pair(block) and quantization.get("scale_fmt", "float") == "float"
    if not by_block or quantization.get("modules_to_convert"):
        return f"{model} to fp8 without a scale for each block of a weight; {HINT}"
    # transformers would assume smaller blocks and compute wrong weights.
    for name, size in _sizes(config).items():
        if any(size % side for side in block):
            shape = f"{block[0]} x {block[1]}"
            return f"{model} to fp8 in blocks of {shape}, but {name} {size} is not a multiple of that; {HINT}"
    return None


def dequantization_arguments(config: PreTrainedConfig, source: dict[str, Any]) -> dict[str, Any]:
    """Return arguments that make transformers dequantize weights, even for devices with quantized kernels."""
    if "gguf_file" in source:
        return {"quantization_config": GgufConfig(dequantize=True)}
    if method_of(config) == "fp8":
        return {"quantization_config": FineGrainedFP8Config(dequantize=True)}
    return {}


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


def _is_pair(block: object) -> bool:
    return isinstance(block, list) and len(block) == 2 and all(isinstance(side, int) and side > 0 for side in block)


def _sizes(config: Any) -> dict[str, int]:
    """Return the row and column counts of a decoder layer's weights by their names in the configuration."""
    sizes = {name: size for name, size in vars(config).items() if name.endswith("intermediate_size")}
    sizes["hidden_size"] = config.hidden_size
    heads, head_dim = config.num_attention_heads, head_dim_of(config)
    sizes["num_attention_heads x head_dim"] = heads * head_dim
    sizes["num_key_value_heads x head_dim"] = (getattr(config, "num_key_value_heads", None) or heads) * head_dim
    return {name: size for name, size in sizes.items() if isinstance(size, int)}
