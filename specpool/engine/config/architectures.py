"""Kinds of models, by the names in their configuration."""

LANGUAGE_MODELS = ("ForCausalLM", "LMHeadModel", "ForCausalLMEagle", "ForCausalLMEagle3")
"""Endings of the architectures with a causal language-model head, those of EAGLE heads included."""


def why_not_a_decoder(model_type: object, architectures: object, is_encoder_decoder: bool) -> str | None:
    """Return why a model is not a decoder-only language model; None if it is, or if it names no architectures."""
    if is_encoder_decoder:
        return f"a {model_type} model is an encoder-decoder; only decoder-only models are served"
    names = [str(name) for name in architectures] if isinstance(architectures, list) else []
    if names and not any(name.endswith(LANGUAGE_MODELS) for name in names):
        return f"a {model_type} model has no causal language-model head (architectures: {', '.join(names)})"
    return None
