"""Randomly initialized models with the shapes of well-known ones, for timing without their weights."""

from collections.abc import Mapping
from typing import Any

import torch
from tokenizers import Tokenizer, models
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from specpool.engine.config.architectures import FEATURES
from specpool.engine.models.draft_parts import features_of
from specpool.engine.models.eagle import eagle1_modules, eagle3_modules
from specpool.engine.models.loading import LoadedModel
from specpool.engine.passes.attention import PACKED_ATTENTION
from specpool.engine.passes.features import FeatureEmbedding, StateNorm
from specpool.protocol.tokenizer import TokenizerFiles

MAX_MODEL_LEN = 4096
_QWEN3 = {
    "model_type": "qwen3", "vocab_size": 151_936, "num_key_value_heads": 8, "head_dim": 128,
    "max_position_embeddings": 40_960, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
}  # fmt: skip
SHAPES: dict[str, dict[str, Any]] = {
    "qwen3-8b": {
        **_QWEN3, "hidden_size": 4096, "intermediate_size": 12_288, "num_hidden_layers": 36,
        "num_attention_heads": 32, "tie_word_embeddings": False,
    },
    "qwen3-0.6b": {
        **_QWEN3, "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28,
        "num_attention_heads": 16, "tie_word_embeddings": True,
    },
}  # fmt: skip
MIXTURE_SHAPES: dict[str, dict[str, Any]] = {
    "qwen3-30b-a3b": {
        **_QWEN3, "model_type": "qwen3_moe", "hidden_size": 2048, "num_attention_heads": 32, "num_key_value_heads": 4,
        "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768, "norm_topk_prob": True,
    },
    "gpt-oss-20b": {
        "model_type": "gpt_oss", "vocab_size": 201_088, "hidden_size": 2880, "intermediate_size": 2880,
        "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64, "num_local_experts": 32,
        "num_experts_per_tok": 4,
    },
    "glm-4.5-air": {
        "model_type": "glm4_moe", "vocab_size": 151_552, "hidden_size": 4096, "num_attention_heads": 96,
        "num_key_value_heads": 8, "head_dim": 128, "attention_bias": True, "n_routed_experts": 128,
        "num_experts_per_tok": 8, "moe_intermediate_size": 1408, "n_shared_experts": 1, "first_k_dense_replace": 0,
        "max_position_embeddings": 32_768,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
    },
}  # fmt: skip
"""Models with a mixture of experts in every layer. The number of layers is left open."""

_HYBRID = {
    "head_dim": 256, "linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_key_head_dim": 128,
    "linear_value_head_dim": 128, "max_position_embeddings": 262_144, "tie_word_embeddings": False,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25},
}  # fmt: skip
HYBRID_SHAPES: dict[str, dict[str, Any]] = {
    "qwen3.5-0.8b": {
        **_HYBRID, "model_type": "qwen3_5_text", "vocab_size": 248_320, "hidden_size": 1024, "intermediate_size": 3584,
        "num_hidden_layers": 24, "num_attention_heads": 8, "num_key_value_heads": 2, "linear_num_value_heads": 16,
        "tie_word_embeddings": True,
    },
    "qwen3.5-9b": {
        **_HYBRID, "model_type": "qwen3_5_text", "vocab_size": 248_320, "hidden_size": 4096,
        "intermediate_size": 12_288, "num_hidden_layers": 32, "num_attention_heads": 16, "num_key_value_heads": 4,
    },
    "qwen3-next-80b-a3b": {
        **_HYBRID, "model_type": "qwen3_next", "vocab_size": 151_936, "hidden_size": 2048, "num_hidden_layers": 48,
        "num_attention_heads": 16, "num_key_value_heads": 2, "num_experts": 512, "num_experts_per_tok": 10,
        "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512,
    },
}  # fmt: skip
"""Models with gated delta nets; every fourth layer attends."""

SHORT_CONV_SHAPES: dict[str, dict[str, Any]] = {
    "lfm2-1.2b": {
        "model_type": "lfm2", "vocab_size": 65_536, "hidden_size": 2048, "num_hidden_layers": 16,
        "layer_types": ["full_attention" if layer in (2, 5, 8, 10, 12, 14) else "conv" for layer in range(16)],
    },
    "lfm2-8b-a1b": {"model_type": "lfm2_moe", "vocab_size": 65_536, "num_dense_layers": 0},
}  # fmt: skip
"""Models with gated short convolutions. Keys that are left open have the defaults of their families."""

LATENT_SHAPES: dict[str, dict[str, Any]] = {
    "deepseek-v2-lite": {
        "model_type": "deepseek_v2", "vocab_size": 102_400, "hidden_size": 2048, "intermediate_size": 10_944,
        "moe_intermediate_size": 1408, "num_hidden_layers": 27, "num_attention_heads": 16, "num_key_value_heads": 16,
        "n_routed_experts": 64, "n_shared_experts": 2, "num_experts_per_tok": 6, "q_lora_rank": None,
        "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
        "first_k_dense_replace": 1, "topk_method": "greedy", "max_position_embeddings": 32_768,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
    },
    "glm-4.7-flash": {
        "model_type": "glm4_moe_lite", "vocab_size": 154_880, "num_hidden_layers": 47,
        "max_position_embeddings": 32_768,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
    },
    "deepseek-v3": {
        "model_type": "deepseek_v3", "vocab_size": 129_280, "num_hidden_layers": 61, "first_k_dense_replace": 1,
        "max_position_embeddings": 32_768,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
    },
}  # fmt: skip
"""Models with latent attention. Keys that are left open have the defaults of their families."""

_QWEN3_HEAD = {
    **_QWEN3, "model_type": "llama", "hidden_size": 4096, "intermediate_size": 12_288, "num_hidden_layers": 1,
    "num_attention_heads": 32, "tie_word_embeddings": False,
}  # fmt: skip
HEAD_SHAPES: dict[str, dict[str, Any]] = {
    "qwen3-8b eagle3": {
        **_QWEN3_HEAD, "draft_vocab_size": 32_000, FEATURES: {"layers": [2, 18, 33], "width": 3 * 4096}
    },
    "qwen3-8b eagle1": {**_QWEN3_HEAD, FEATURES: {"layers": [36], "width": 4096}},
}  # fmt: skip
"""EAGLE heads, with the states of the target that they read. Those of EAGLE-3 have a `draft_vocab_size`."""


def random_head(shape: Mapping[str, Any], device: str | torch.device, dtype: torch.dtype) -> PreTrainedModel:
    """A randomly initialized EAGLE head of a shape such as those of `HEAD_SHAPES`."""
    config = AutoConfig.for_model(**shape)
    hidden, width = config.hidden_size, shape[FEATURES]["width"]
    with torch.device(device):
        if "draft_vocab_size" in shape:
            head: Any = eagle3_modules(config, shape["draft_vocab_size"])
            parts: tuple[Any, ...] = None, nn.Linear(width, hidden, bias=False), None
        else:
            head = eagle1_modules(config)
            parts = nn.Linear(2 * hidden, hidden), None, StateNorm(torch.ones(1, width), config.rms_norm_eps)
        head.set_input_embeddings(FeatureEmbedding(head.get_input_embeddings(), *parts))
    model: PreTrainedModel = head.to(dtype).eval()
    return model


def random_model(
    shape: str, device: str | torch.device, dtype: torch.dtype, attention: str, **changes: Any
) -> PreTrainedModel:
    """A randomly initialized model of this shape. `changes`: to its configuration."""
    sizes = {**(SHAPES | MIXTURE_SHAPES | HYBRID_SHAPES | SHORT_CONV_SHAPES | LATENT_SHAPES)[shape], **changes}
    config = AutoConfig.for_model(sizes.pop("model_type"), **sizes)
    with torch.device(device):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=attention)
    model.eval()
    return model


def random_loaded(shape: str, device: str, dtype: torch.dtype, **changes: Any) -> LoadedModel:
    """A random model or head of this shape, loaded for an engine. `changes`: changes to a model's configuration."""
    tokenizer = TokenizerFiles(Tokenizer(models.BPE()).to_str().encode(), "", {}, ())  # without tokens
    if shape not in HEAD_SHAPES:
        model = random_model(shape, device, dtype, PACKED_ATTENTION, **changes)
        return LoadedModel(shape, model, tokenizer, MAX_MODEL_LEN)
    head, outputs = random_head(HEAD_SHAPES[shape], device, dtype), HEAD_SHAPES[shape].get("draft_vocab_size")
    ids = None if outputs is None else torch.arange(outputs, device=device)
    features = features_of(head.config)
    return LoadedModel(shape, head, tokenizer, MAX_MODEL_LEN, ids, features=features, modules_run=False)
