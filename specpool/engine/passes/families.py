"""The model families that the fused pass runs, and how it reads their configurations."""

from collections.abc import Mapping, Set
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedConfig

from specpool.engine.config.architectures import DELTA_NETS, KIMI_LINEAR, RECURRENT_LAYERS, SHORT_CONVS
from specpool.engine.config.recurrent_sizes import RecurrentSizes, read_recurrent_sizes
from specpool.engine.passes.kinds import SILU, Activation

# Families that rotate pairs of adjacent features. The others pair features half a head apart.
INTERLEAVED = {"glm", "glm4"}
GEMMA = {"gemma", "gemma2", "gemma3_text"}
# Families whose norms multiply by 1 + weight.
OFFSET_NORMS = GEMMA | DELTA_NETS
# Vicuna and SmolLM are Llamas too. Norms, windows and experts are detected by name.
SHARDABLE = {"llama", "mistral", "qwen2", "qwen3"} | INTERLEAVED
# Families whose layers may have windows. The others ignore the field.
WINDOWED = {"mistral", "ministral", "mixtral", "qwen2", "qwen3", "qwen3_moe", "gemma2", "gemma3_text", "gpt_oss"}
# Families that cache a latent vector instead of keys and values.
LATENT = {"deepseek_v2", "deepseek_v3", "glm4_moe_lite", "youtu", KIMI_LINEAR}
MIXTURES = {"gpt_oss", "mixtral", "qwen3_moe", "glm4_moe", "qwen3_next", "qwen3_5_moe_text", "lfm2_moe"} | (
    LATENT - {"youtu"}
)
FAMILIES = SHARDABLE | GEMMA | MIXTURES | DELTA_NETS | SHORT_CONVS | LATENT | {"ministral", "seed_oss"}

ACTIVATIONS: Mapping[str, Activation] = MappingProxyType({"silu": SILU, "gelu_pytorch_tanh": Activation("gelu_tanh")})
"""Activations of the fused pass, by their name in transformers."""


def window_of(config: PreTrainedConfig) -> int | None:
    """Return the sliding window in positions, including the row's own; None if no layer has one."""
    types = getattr(config, "layer_types", None)
    if not getattr(config, "use_sliding_window", True) or (types and "sliding_attention" not in types):
        return None
    return getattr(config, "sliding_window", None)


def longest_window(config: PreTrainedConfig) -> int | None:
    """Return the longest window of all layers, as `window_of`; None if a layer attends to all positions."""
    types = getattr(config, "layer_types", None) or ()
    if config.model_type in FAMILIES - WINDOWED or not {*types} <= {"sliding_attention"}:
        return None
    return window_of(config)


def recurrent_sizes(config: PreTrainedConfig) -> RecurrentSizes | None:
    """Return the sizes of a model's recurrent layers; None if all layers attend."""
    layers = [*(getattr(config, "layer_types", None) or ())].count(RECURRENT_LAYERS.get(config.model_type))
    if not layers:
        return None
    return read_recurrent_sizes(config.model_type, layers, partial(getattr, config))


class LatentSizes(NamedTuple):
    """Features that a layer with latent attention caches of a position."""

    rank: int
    """The latent vector, from which keys and values are computed."""
    rotary: int
    """The part of the key that rotates."""


def latent_sizes(config: PreTrainedConfig) -> LatentSizes | None:
    """Return what the fused pass caches of a position with latent attention; None if it caches keys and values."""
    if config.model_type not in LATENT or not is_fusable(config):
        return None
    sizes: Any = config
    return LatentSizes(sizes.kv_lora_rank, sizes.qk_rope_head_dim)


def is_interleaved(config: PreTrainedConfig) -> bool:
    """Return whether rotary pairs are adjacent features, instead of features half a head apart."""
    return config.model_type in INTERLEAVED or (
        config.model_type in LATENT and bool(getattr(config, "rope_interleave", True))
    )


def expert_count(config: PreTrainedConfig) -> int:
    """Return the number of experts of a layer, without shared ones; 0 if no layer has experts."""
    names = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
    return next((count for name in names if isinstance(count := getattr(config, name, None), int)), 0)


def embedding_scale(config: PreTrainedConfig, dtype: torch.dtype) -> float:
    """Return the factor of embeddings, rounded to the dtype of a model."""
    scale = config.hidden_size**0.5 if config.model_type in GEMMA else 1.0
    return torch.tensor(scale, dtype=dtype).item()


def norm_eps(config: PreTrainedConfig) -> float:
    """Return the epsilon of norms."""
    sizes: Any = config
    eps: float = sizes.norm_eps if config.model_type in SHORT_CONVS else sizes.rms_norm_eps
    return eps


def activation_of(config: PreTrainedConfig) -> Activation | None:
    """Return the activation of all MLPs; None if the fused pass lacks it."""
    if config.model_type == "gpt_oss":  # transformers before 5.18 hard-codes these numbers
        alpha, limit = getattr(config, "swiglu_alpha", 1.702), getattr(config, "swiglu_limit", 7.0)
        return Activation("silu", alpha, limit, shift=1.0)
    return ACTIVATIONS.get(_activation_name(config))


def rotary_types(config: PreTrainedConfig) -> list[str | None]:
    """Return the layer types that have their own rotary embedding; [None] if all layers share one."""
    rope: Mapping[str, Any] = getattr(config, "rope_parameters", None) or {}
    used = getattr(config, "layer_types", None) or ()
    return [name for name, each in rope.items() if isinstance(each, dict) and name in used] or [None]


def is_fusable(config: PreTrainedConfig) -> bool:
    """Return whether `FusedModel` can run this configuration."""
    return why_not_fusable(config) is None


def why_not_fusable(config: PreTrainedConfig) -> str | None:
    """Return why `FusedModel` cannot run this configuration; None if it can."""
    if (reason := _not_among(FAMILIES, config)) is not None:
        return reason
    if activation_of(config) is None:
        return f"its activation is {_activation_name(config)}, not {' or '.join(ACTIVATIONS)}"
    if config.model_type == KIMI_LINEAR:  # without rotary embeddings
        return None
    rope: Mapping[str, Any] = getattr(config, "rope_parameters", None) or {}
    for each in [rope[name] for name in rotary_types(config) if name] or [rope]:
        if "rope_theta" not in each:
            return "its rotary embedding has no rope_theta"
        # These types encode a position differently in a longer batch, so a table cannot hold them.
        if each.get("rope_type", "default") in ("dynamic", "longrope"):
            return f"its rotary embedding has the type {each['rope_type']}"
    return None


def why_not_shardable(config: PreTrainedConfig) -> str | None:
    """Return why the ranks of a group cannot share this model; None if they can."""
    return _not_among(SHARDABLE, config) or why_not_fusable(config)


def _not_among(families: Set[str], config: PreTrainedConfig) -> str | None:
    if config.model_type in families:
        return None
    return f"{config.model_type} is not one of the families {', '.join(sorted(families))}"


def _activation_name(config: PreTrainedConfig) -> str:
    sizes: Any = config
    if config.model_type in SHORT_CONVS:
        return "silu"
    name: str = sizes.hidden_activation if config.model_type in GEMMA - {"gemma"} else sizes.hidden_act
    return name
