"""The supported GGUF architectures, and the keys that each one reads.

Sources: ggml's docs/gguf.md for names; llama.cpp's src/llama-model.cpp and src/models/ for defaults, and for the keys
that each architecture reads.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from specpool.engine.models.gguf_reader import GgufFile

WINDOW, BASE_OF_WINDOWS, WINDOW_PATTERN = (
    "attention.sliding_window",
    "rope.freq_base_swa",
    "attention.sliding_window_pattern",
)
HEADS, KEY_LENGTH, VALUE_LENGTH = "attention.head_count", "attention.key_length", "attention.value_length"
CAP, ATTENTION_CAP = "final_logit_softcapping", "attn_logit_softcapping"
FEED_FORWARD, EXPERT_FEED_FORWARD = "feed_forward_length", "expert_feed_forward_length"
NEXTN, DENSE_LAYERS = "nextn_predict_layers", "leading_dense_block_count"
EXPERTS, USED_EXPERTS = "expert_count", "expert_used_count"
GATING, WEIGHTS_NORM, WEIGHTS_SCALE = "expert_gating_func", "expert_weights_norm", "expert_weights_scale"
SOFTMAX, SIGMOID, SOFTMAX_OF_CHOSEN = 1, 2, 3
"""Values of `expert_gating_func`."""
RMS_NORM = {
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    FEED_FORWARD: "intermediate_size",
    HEADS: "num_attention_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
}
LAYER_NORM = {key: name for key, name in RMS_NORM.items() if name != "rms_norm_eps"}
MIXTURE = {**RMS_NORM, EXPERTS: "num_experts", USED_EXPERTS: "num_experts_per_tok"}
SIZED_MIXTURE = {**MIXTURE, EXPERT_FEED_FORWARD: "moe_intermediate_size"}
OPTIONAL = {"vocab_size": "vocab_size", "attention.head_count_kv": "num_key_value_heads", KEY_LENGTH: "head_dim"}


@dataclass(frozen=True)
class Family:
    """The keys of an architecture's files, without the architecture prefix."""

    model_type: str
    required: Mapping[str, str]  # configuration field by key
    optional: Mapping[str, str] = field(default_factory=dict)
    neutral: Mapping[str, tuple[object, ...]] = field(default_factory=dict)
    defaults: Mapping[str, float] = field(default_factory=dict)
    fixed: Mapping[str, Any] = field(default_factory=dict)  # configuration fields that llama.cpp implies
    equal: Mapping[str, str] = field(default_factory=dict)  # optional keys, each with the key that it must equal
    rotary: bool = True
    partial: bool = False  # whether the rotary embedding may cover only part of each head
    free_head_dim: bool = True  # whether head_dim may differ from hidden_size / num_attention_heads
    scaled_by_width: int | None = None  # Gemma: number of layers of the size that scales scores by hidden_size
    pattern: int | None = None  # every n-th layer attends to all positions; None: all layers are alike


def _routing(function: int, norm: bool) -> dict[str, tuple[object, ...]]:
    """Return the only key values that match the routing built into an architecture."""
    return {GATING: (function,), WEIGHTS_NORM: (norm,), WEIGHTS_SCALE: (0, 1)}


FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        "llama": Family("llama", RMS_NORM),
        "qwen2": Family("qwen2", RMS_NORM),
        "qwen3": Family("qwen3", RMS_NORM),
        "qwen2moe": Family(
            "qwen2_moe",
            {**SIZED_MIXTURE, "expert_shared_feed_forward_length": "shared_expert_intermediate_size"},
            neutral=_routing(SOFTMAX, norm=False),
            fixed={"norm_topk_prob": False},
        ),
        "qwen3moe": Family(
            "qwen3_moe", SIZED_MIXTURE, neutral=_routing(SOFTMAX, norm=True), fixed={"norm_topk_prob": True}
        ),
        "olmoe": Family(
            "olmoe",
            MIXTURE,
            neutral=_routing(SOFTMAX, norm=False),
            fixed={"norm_topk_prob": False},
            equal={EXPERT_FEED_FORWARD: FEED_FORWARD},
        ),
        "gpt-oss": Family(
            "gpt_oss",
            {**MIXTURE, EXPERTS: "num_local_experts", WINDOW: "sliding_window"},
            neutral=_routing(SOFTMAX_OF_CHOSEN, norm=False),
            equal={EXPERT_FEED_FORWARD: FEED_FORWARD},
            pattern=2,
        ),
        "glm4moe": Family(
            "glm4_moe",
            {**SIZED_MIXTURE, EXPERTS: "n_routed_experts", "expert_shared_count": "n_shared_experts"},
            {
                DENSE_LAYERS: "first_k_dense_replace",
                WEIGHTS_NORM: "norm_topk_prob",
                WEIGHTS_SCALE: "routed_scaling_factor",
                "expert_group_count": "n_group",
                "expert_group_used_count": "topk_group",
                NEXTN: "num_nextn_predict_layers",
            },
            neutral={GATING: (SIGMOID,)},
            defaults={DENSE_LAYERS: 0, WEIGHTS_NORM: False, WEIGHTS_SCALE: 1.0, NEXTN: 0},
            partial=True,
        ),
        "phi3": Family(
            "phi3", RMS_NORM, {"rope.scaling.original_context_length": "original_max_position_embeddings"}, partial=True
        ),
        "gemma": Family("gemma", RMS_NORM),
        "gemma2": Family(
            "gemma2",
            {**RMS_NORM, WINDOW: "sliding_window"},
            {CAP: CAP, ATTENTION_CAP: ATTENTION_CAP},
            defaults={WINDOW: 4096, CAP: 30.0, ATTENTION_CAP: 50.0},
            scaled_by_width=46,
            pattern=2,
        ),
        "gemma3": Family(
            "gemma3_text", {**RMS_NORM, WINDOW: "sliding_window"}, {CAP: CAP}, scaled_by_width=62, pattern=6
        ),
        "starcoder2": Family("starcoder2", {**LAYER_NORM, "attention.layer_norm_epsilon": "norm_epsilon"}),
        "gpt2": Family(
            "gpt2",
            {**LAYER_NORM, "attention.layer_norm_epsilon": "layer_norm_epsilon", FEED_FORWARD: "n_inner"},
            rotary=False,
            free_head_dim=False,
        ),
    }
)
"""Supported architectures."""
MIXTRAL = Family(
    "mixtral",
    {**MIXTURE, EXPERTS: "num_local_experts"},
    neutral=_routing(SOFTMAX, norm=True),
    equal={EXPERT_FEED_FORWARD: FEED_FORWARD},
)
"""The family of `llama` files with experts."""
MISTRAL = Family("mistral", RMS_NORM)
"""The family of `llama` files with a sliding window."""

NEUTRAL: Mapping[str, tuple[object, ...]] = MappingProxyType(
    {
        "attention.causal": (True,),
        "attention.clamp_kqv": (0,),
        "attention.max_alibi_bias": (0,),
        "attention.scale": (0,),
        ATTENTION_CAP: (0,),
        CAP: (0,),
        "embedding_scale": (0, 1),
        EXPERTS: (0,),
        "expert_group_count": (0, 1),
        "expert_group_used_count": (0, 1),
        USED_EXPERTS: (0,),
        "expert_shared_count": (0,),
        DENSE_LAYERS: (0,),
        "logit_scale": (0, 1),
        NEXTN: (0,),
        "residual_scale": (0, 1),
        "use_parallel_residual": (False,),
    }
)
"""Values that do not affect the results of any architecture."""
WITHOUT_EFFECT = frozenset(
    {
        "attention.layer_norm_epsilon",  # for architectures with the other kind of norm
        "attention.layer_norm_rms_epsilon",
        "pooling_type",  # for embeddings
        "tensor_data_layout",  # all files of an architecture have the same layout
    }
)
"""Keys that no supported architecture reads."""


def family_of(file: GgufFile) -> Family | None:
    """Return the family of a file; None if its architecture is not supported."""
    if file.architecture == "llama":
        if file.metadata.get(f"llama.{EXPERTS}"):
            return MIXTRAL
        if file.metadata.get(f"llama.{WINDOW}"):
            return MISTRAL
    return FAMILIES.get(file.architecture)
