"""Loads a model's configuration and refuses unsupported models."""

from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, PreTrainedConfig

from specpool.engine.config.architectures import why_not_a_decoder
from specpool.engine.config.hub import hub_config
from specpool.engine.config.options import EngineOptions
from specpool.engine.config.sources import UnsupportedModelError, first_line, source_of
from specpool.engine.models.checkpoint_quantization import why_unsupported_quantization
from specpool.engine.models.gguf_reader import GgufError, GgufFile

UNSTATED_MAX_MODEL_LEN = 4096
"""Maximum positions of a model that states none. No default is shorter, except the model's own limit."""
ROTARY, WINDOW = "rotary embedding", "sliding window"


class _ConfigTypes(BaseModel, from_attributes=True, strict=True):
    """Types of the values that the engine reads, because transformers does not check them all."""

    architectures: list[str] | None = None
    layer_types: list[str] | None = None
    max_position_embeddings: int | None = None
    num_attention_heads: int | None = None
    sliding_window: int | None = None
    use_sliding_window: bool | None = None


def load_config(options: EngineOptions) -> PreTrainedConfig:
    """Load a model's configuration. Raises UnsupportedModelError if the model cannot be served."""
    source = source_of(options.model, options.revision)
    if not Path(options.model).exists():
        hub_config(options.model, options.revision)  # for clearer errors than those of transformers
    try:
        if "gguf_file" in source:
            GgufFile(Path(options.model))  # likewise
        config: PreTrainedConfig = AutoConfig.from_pretrained(**source)
    except GgufError as error:
        raise UnsupportedModelError(str(error)) from error
    except Exception as error:  # the files may contain anything
        message = f"{options.model} is not a usable model: {explain(error)}"
        raise UnsupportedModelError(message) from error
    _check_types(config)
    max_model_len = resolve_max_model_len(config, options)
    refusal = (
        _why_no_language_model(config)
        or _why_not_full_attention(config, max_model_len)
        or why_unsupported_quantization(config)
    )
    if refusal is not None:
        raise UnsupportedModelError(refusal)
    return config


def resolve_max_model_len(config: PreTrainedConfig, options: EngineOptions) -> int:
    """Return the maximum positions of a sequence before memory is considered.

    By default, these are all positions of the model that have full attention. Raises UnsupportedModelError if the model
    has fewer positions than the options ask for.
    """
    limit = _own_max_model_len(config)
    if options.max_model_len is not None:
        if options.max_model_len > limit:
            raise UnsupportedModelError(f"max_model_len {options.max_model_len} exceeds the model's {limit} positions")
        return options.max_model_len
    if options.kv_layout == "padded":  # every sequence takes the columns of the longest
        return min(limit, UNSTATED_MAX_MODEL_LEN)
    # Serving fewer positions than this must be asked for.
    return min(limit, max(UNSTATED_MAX_MODEL_LEN, min(_attention_limits(config).values(), default=limit)))


def explain_max_model_len(config: PreTrainedConfig, options: EngineOptions, chosen: int) -> str:
    """Return why an engine serves `chosen` positions."""
    own, resolved = _own_max_model_len(config), resolve_max_model_len(config, options)
    if options.max_model_len is not None:
        return f"as set; the model has {own}"
    if chosen < resolved:
        return f"the model has {own}; limited by KV memory"
    if chosen < own:
        limits = _attention_limits(config)
        reason = "padded layout" if options.kv_layout == "padded" else min(limits, key=limits.__getitem__)
        return f"the model has {own}; limited by its {reason}"
    return "all positions of the model"


def explain(error: Exception) -> str:
    """Return why transformers failed. Messages about unsafe files are replaced by clearer ones."""
    reason = first_line(error)
    if "contains custom code" in reason:
        return "it needs its own code, which is never run"
    if "no file named model.safetensors" in reason or "a file named model.safetensors" in reason:
        return "it has no model.safetensors; only safetensors and GGUF files are read, because others can run code"
    return reason


def _check_types(config: PreTrainedConfig) -> None:
    try:
        _ConfigTypes.model_validate(config)
    except ValidationError as error:
        problem = error.errors()[0]
        key = ".".join(map(str, problem["loc"]))
        raise UnsupportedModelError(f"the configuration has {key} {problem['input']!r}: {problem['msg']}") from None


def _why_no_language_model(config: PreTrainedConfig) -> str | None:
    model_type, architectures = config.model_type, getattr(config, "architectures", None)
    refusal = why_not_a_decoder(model_type, architectures, config.is_encoder_decoder)
    # GGUF files name no architecture; transformers then picks its class for the model type.
    if refusal is None and not architectures and type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        return f"a {model_type} model has no causal language-model head (architectures: none)"
    return refusal


def _why_not_full_attention(config: PreTrainedConfig, max_model_len: int) -> str | None:
    model = f"{config.model_type} model"
    unsupported = sorted(set(getattr(config, "layer_types", None) or ()) - {"full_attention", "sliding_attention"})
    if unsupported:
        return f"this {model} has {', '.join(unsupported)} layers; only full attention is served"
    if not getattr(config, "num_attention_heads", None):
        return f"a {model} has no attention; only full attention is served"
    limits = _attention_limits(config)
    switch, window = limits.get(ROTARY, max_model_len), limits.get(WINDOW, max_model_len)
    if switch < max_model_len:
        return (
            f"this {model} re-encodes the positions of a whole batch once one exceeds {switch}; "
            f"serve it with max_model_len <= {switch}"
        )
    if window < max_model_len:
        return f"this {model} has a sliding window of {window} positions; serve it with max_model_len <= {window}"
    return None


def _own_max_model_len(config: PreTrainedConfig) -> int:
    return getattr(config, "max_position_embeddings", None) or UNSTATED_MAX_MODEL_LEN


def _attention_limits(config: PreTrainedConfig) -> dict[str, int]:
    """Return the lengths from which attention is no longer full, or changes for a whole batch, by their cause."""
    rope: dict[str, Any] = getattr(config, "rope_parameters", None) or {}
    variants = [rope, *(part for part in rope.values() if isinstance(part, dict))]  # one per layer type
    switches = [part["original_max_position_embeddings"] for part in variants if part.get("rope_type") == "longrope"]
    window = getattr(config, "sliding_window", None) if getattr(config, "use_sliding_window", True) else None
    limits = {ROTARY: min(switches, default=None), WINDOW: window}
    return {cause: limit for cause, limit in limits.items() if limit is not None}
