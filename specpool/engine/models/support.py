"""Which models can be served, as far as their configurations tell."""

from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, PreTrainedConfig

from specpool.engine.models.quantization import why_not_unpacked


def why_unsupported(config: PreTrainedConfig, max_model_len: int) -> str | None:
    """The reason why a model of this configuration cannot be served with `max_model_len` positions; None if it can."""
    return _why_not_a_decoder(config) or _why_not_full_attention(config, max_model_len) or why_not_unpacked(config)


def _why_not_a_decoder(config: PreTrainedConfig) -> str | None:
    kind = f"{config.model_type} model"
    if config.is_encoder_decoder:
        return f"a {kind} is an encoder-decoder; only decoder-only models generate by this method"
    architectures = getattr(config, "architectures", None) or []
    # A GGUF file names no class; transformers then uses its class for this kind of model.
    named = any(name.endswith(("ForCausalLM", "LMHeadModel")) for name in architectures)
    if not (named if architectures else type(config) in MODEL_FOR_CAUSAL_LM_MAPPING):
        return f"a {kind} has no causal language-model head (architectures: {', '.join(architectures) or 'none'})"
    return None


def _why_not_full_attention(config: PreTrainedConfig, max_model_len: int) -> str | None:
    kind = f"{config.model_type} model"
    others = sorted(set(getattr(config, "layer_types", None) or ()) - {"full_attention", "sliding_attention"})
    if others:
        return f"this {kind} has {', '.join(others)} layers; only full attention is served"
    if not getattr(config, "num_attention_heads", None):
        return f"a {kind} has no attention; only full attention is served"
    switch = _length_dependent_rope(config)
    if switch is not None and switch < max_model_len:
        return (
            f"this {kind} encodes all positions of a batch differently once one is beyond {switch}; "
            f"serve it with max_model_len <= {switch}"
        )
    window = getattr(config, "sliding_window", None) if getattr(config, "use_sliding_window", True) else None
    if window is not None and window < max_model_len:
        return f"this {kind} has a sliding window of {window} positions; serve it with max_model_len <= {window}"
    return None


def _length_dependent_rope(config: PreTrainedConfig) -> int | None:
    """The length of a sequence beyond which the rotary embedding of its whole batch changes; None if it never does."""
    rope = getattr(config, "rope_parameters", None) or {}
    kinds = [rope, *(part for part in rope.values() if isinstance(part, dict))]  # one per type of layer
    return min(
        (kind["original_max_position_embeddings"] for kind in kinds if kind.get("rope_type") == "longrope"),
        default=None,
    )
