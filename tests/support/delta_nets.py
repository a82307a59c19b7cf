"""Random models with recurrent layers. States of gated delta nets matter many positions later."""

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from tiny_models import round_weights, small_config
from transformers import AutoModelForCausalLM

from benchmarks.pair import save_tokenizer

DELTA_NET_SIZES: dict[str, Any] = {
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 32,
}
EXPERTS = {
    "num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 48,
}  # fmt: skip
DELTA_NET_MODELS: Mapping[str, tuple[str, dict[str, Any]]] = MappingProxyType(
    {
        "qwen3_next": ("qwen3_next", {**EXPERTS, "mlp_only_layers": [2]}),
        "qwen3_next, not renormalized": (
            "qwen3_next",
            {**EXPERTS, "decoder_sparse_step": 2, "norm_topk_prob": False, "attention_bias": True},
        ),
        "qwen3_next, dense": ("qwen3_next", {"num_experts": 0, "linear_num_key_heads": 4, "linear_conv_kernel_dim": 3}),
        "qwen3_5_text": ("qwen3_5_text", {"tie_word_embeddings": True}),
        "qwen3_5_moe_text": ("qwen3_5_moe_text", EXPERTS),
    }
)
"""Architectures and changes of `small_config` and `DELTA_NET_SIZES`, by name."""
SHORT_CONV_SIZES: dict[str, Any] = {"num_hidden_layers": 4, "layer_types": ["conv", "conv", "full_attention", "conv"]}
SHORT_CONV_MODELS: Mapping[str, tuple[str, dict[str, Any]]] = MappingProxyType(
    {
        "lfm2": ("lfm2", {"block_multiple_of": 16, "tie_word_embeddings": True}),
        "lfm2, biased": ("lfm2", {"block_auto_adjust_ff_dim": False, "conv_bias": True, "conv_L_cache": 4}),
        "lfm2_moe": (
            "lfm2_moe",
            {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 32, "num_dense_layers": 1},
        ),
        "lfm2_moe, without a correction": (
            "lfm2_moe",
            {"num_experts": 8, "moe_intermediate_size": 32, "use_expert_bias": False, "routed_scaling_factor": 1.5},
        ),
    }
)
"""Architectures and changes of `small_config` and `SHORT_CONV_SIZES`, by name."""
KIMI_SIZES: dict[str, Any] = {
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"],
    "linear_num_heads": 3, "linear_head_dim": 16, "num_key_value_heads": 4, "kv_lora_rank": 32,
    "qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 32, "num_experts": 8, "num_experts_per_token": 3,
    "moe_intermediate_size": 32,
}  # fmt: skip
KIMI_MODELS: Mapping[str, tuple[str, dict[str, Any]]] = MappingProxyType(
    {
        "kimi_linear": ("kimi_linear", {}),
        "kimi_linear, query rank": (
            "kimi_linear",
            {
                "q_lora_rank": 48, "num_expert_group": 4, "topk_group": 2, "linear_conv_kernel_dim": 3,
                "mlp_layer_types": ["dense", "dense", "dense", "sparse"],
            },
        ),
    }
)  # fmt: skip
"""Architectures and changes of `small_config` and `KIMI_SIZES`, by name."""
RECURRENT_MODELS: Mapping[str, tuple[str, dict[str, Any]]] = MappingProxyType(
    {
        name: (architecture, {**sizes, **own})
        for models, sizes in (
            (DELTA_NET_MODELS, DELTA_NET_SIZES),
            (SHORT_CONV_MODELS, SHORT_CONV_SIZES),
            (KIMI_MODELS, KIMI_SIZES),
        )
        for name, (architecture, own) in models.items()
    }
)
"""Architectures and changes of `small_config`, by name."""


def save_delta_net(folder: Path, name: str = "qwen3_5_text", **changes: Any) -> Path:
    """Save one of `DELTA_NET_MODELS` with weights that bfloat16 represents exactly."""
    assert name in DELTA_NET_MODELS
    return save_recurrent(folder, name, **changes)


def save_recurrent(folder: Path, name: str, **changes: Any) -> Path:
    """Save one of `RECURRENT_MODELS` with weights that bfloat16 represents exactly."""
    torch.manual_seed(0)
    architecture, own = RECURRENT_MODELS[name]
    config = small_config(architecture, **{**own, **changes})
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32)
    set_random_weights(model)
    model.save_pretrained(folder)
    save_tokenizer(folder)
    return round_weights(folder)


@torch.no_grad()
def set_random_weights(model: Any) -> None:
    """Give a model random weights. The decays of its states range from a few positions to thousands."""
    for name, weight in model.named_parameters():
        if name.endswith("A_log"):
            weight.uniform_(-6.0, 0.0)
        elif name.endswith("dt_bias"):
            weight.uniform_(-3.0, 1.0)
        elif "conv1d" in name or "conv.conv" in name or name.endswith("gate.weight"):
            weight.normal_(std=0.5)
        elif "norm" in name:
            weight.add_(torch.randn_like(weight), alpha=0.1)
        else:
            weight.normal_(std=0.12)
    for name, correction in model.named_buffers():
        if name.endswith("expert_bias"):
            correction.normal_(std=0.1)
