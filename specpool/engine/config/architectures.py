"""Recognizes kinds of models, and features that no pass supports, from a configuration. Imports no torch."""

from collections.abc import Callable, Mapping
from types import MappingProxyType

LANGUAGE_MODELS = ("ForCausalLM", "LMHeadModel", "ForCausalLMEagle", "ForCausalLMEagle3")
"""Endings of the architectures with a causal language-model head, those of EAGLE heads included."""
SUPPORTED_LAYERS = frozenset({"full_attention", "sliding_attention"})
DELTA_NETS = frozenset({"qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"})
"""Families whose layers may be gated delta nets."""
SHORT_CONVS = frozenset({"lfm2", "lfm2_moe"})
"""Families whose layers may be gated short convolutions."""
KIMI_LINEAR = "kimi_linear"
"""The family whose layers may be delta nets with a decay for each feature of a key."""
RECURRENT_LAYERS: Mapping[str, str] = MappingProxyType(
    {**dict.fromkeys((*DELTA_NETS, KIMI_LINEAR), "linear_attention"), **dict.fromkeys(SHORT_CONVS, "conv")}
)
"""The name of recurrent layers in `layer_types`, by family; the other layers have full attention."""
FEATURES = "specpool_features"
"""Key in the config.json of a draft that reads its target's hidden states: {"layers": [...], "width": ...}."""
MODELS_PAGE = "docs/models.md lists the supported models"
"""Ends every error message that refuses a kind of model."""

_MODALITIES = ("vision_config", "audio_config", "audio_encoder_config", "audio_encoder", "vq_config", "text_config")
_FEATURES: Mapping[str, str] = MappingProxyType(
    {
        "index_topk": "sparse attention",
        "alibi": "position biases (ALiBi)",
        "is_heterogeneous": "layers of different sizes",
    }
)
"""Features by configuration key. A model has the feature if the key is set to a true value."""
_STATE_SPACE = ("state_size", "ssm_state_size", "mamba_d_state", "mamba_d_ssm")
"""Keys that identify a model's unsupported layers as state-space layers."""
_TYPES: Mapping[str, str] = MappingProxyType(
    {
        "bloom": "position biases (ALiBi)",
        "mpt": "position biases (ALiBi)",
        "rwkv": "recurrent layers without attention",
        "xlstm": "recurrent layers without attention",
        "diffllama": "differential attention",
        "longcat_flash": "two attention blocks per decoder layer",
        "jetmoe": "mixtures of attention heads",
        "reformer": "local and hashed attention",
        "xlnet": "two-stream attention",
        "xlm": "language embeddings",
        "xmod": "language adapters",
        "blt": "byte patches instead of tokens",
    }
)
"""Features by model type, where the configuration has no key for them."""
_DELTA_NET: Mapping[str, tuple[object, ...]] = MappingProxyType(
    {"hidden_act": ("silu",), "attn_output_gate": (True,), "output_gate_type": ("silu", "swish")}
)
_SIGMOID_ROUTER: Mapping[str, tuple[object, ...]] = MappingProxyType(
    {"scoring_func": ("sigmoid",), "topk_method": ("noaux_tc",)}
)
_VALUES: Mapping[str, Mapping[str, tuple[object, ...]]] = MappingProxyType(
    {
        **dict.fromkeys(DELTA_NETS, _DELTA_NET),
        "qwen3_5_moe_text": MappingProxyType({**_DELTA_NET, "norm_topk_prob": (True,)}),
        **dict.fromkeys(("deepseek_v3", "glm4_moe", "glm4_moe_lite"), _SIGMOID_ROUTER),
        "deepseek_v2": MappingProxyType(
            {
                "scoring_func": ("softmax",),
                "topk_method": ("greedy", "group_limited_greedy"),
                "norm_topk_prob": (False,),
            }
        ),
        **dict.fromkeys(SHORT_CONVS, MappingProxyType({"use_pos_enc": (True,), "block_use_swiglu": (True,)})),
        KIMI_LINEAR: MappingProxyType(
            {"mla_use_nope": (True,), "moe_router_activation_func": ("sigmoid",), "use_grouped_topk": (True,)}
        ),
    }
)
"""Supported values of configuration keys, by family. transformers ignores most of the others."""


def why_not_supported(read: Callable[[str], object]) -> str | None:
    """Return why a model with this configuration cannot be served; None if nothing rules it out.

    `read`: returns a value of config.json or of a transformers configuration by key; None if the key is missing.
    """
    model_type, architectures = read("model_type"), read("architectures")
    model = f"this {model_type} model"
    if read("is_encoder_decoder") is True:
        return f"{model} is an encoder-decoder; only decoder-only models are served; {MODELS_PAGE}"
    modalities = ", ".join(key for key in _MODALITIES if read(key))
    if modalities:
        return f"{model} is multimodal ({modalities}), and its text part is not supported; {MODELS_PAGE}"
    features = (feature for key, feature in _FEATURES.items() if read(key))
    feature = _TYPES.get(str(model_type)) or next(features, None)
    if feature is not None:
        return unsupported(model_type, feature)
    names = [str(name) for name in architectures] if isinstance(architectures, list) else []
    if names and not any(name.endswith(LANGUAGE_MODELS) for name in names):
        return f"{model} has no causal language-model head (architectures: {', '.join(names)}); {MODELS_PAGE}"
    for key, values in _VALUES.get(str(model_type), {}).items():
        if (value := read(key)) is not None and value not in values:
            supported = " or ".join(map(repr, values))
            return f"{model} is not supported, because its {key} is {value!r}, not {supported}; {MODELS_PAGE}"
    return None


def why_layers_not_supported(read: Callable[[str], object]) -> str | None:
    """Return why a model's layers cannot be served; None if `layer_types` does not rule them out.

    `read`: returns a value of a transformers configuration, not of config.json, which may use older layer names.
    """
    types = read("layer_types")
    recurrent = RECURRENT_LAYERS.get(str(read("model_type")))
    supported = SUPPORTED_LAYERS if recurrent is None else {"full_attention", recurrent}
    kinds = set(types) if isinstance(types, list | tuple) else set()
    names = sorted(kinds - supported)
    if kinds == {recurrent}:
        return unsupported(read("model_type"), "recurrent layers without attention")
    if not names:
        return None
    if any(map(read, _STATE_SPACE)):  # transformers labels state-space layers so
        names = ["state-space", *(name for name in names if name not in ("hybrid", "linear_attention"))]
    return unsupported(read("model_type"), f"{', '.join(names)} layers")


def unsupported(model_type: object, feature: str) -> str:
    """Return the error message that refuses a model with this feature."""
    return f"this {model_type} model is not supported, because it has {feature}; {MODELS_PAGE}"
