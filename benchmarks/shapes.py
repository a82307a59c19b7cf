"""Random models with the shapes of well-known ones: as fast as those, without their weights."""

from typing import Any

import torch
from tokenizers import Tokenizer, models
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from specpool.engine.models.loading import LoadedModel
from specpool.engine.passes.attention import PACKED_ATTENTION
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


def random_model(
    shape: str, device: str | torch.device, dtype: torch.dtype, attention: str, **changes: Any
) -> PreTrainedModel:
    """A randomly initialized model of this shape. `changes`: to its configuration."""
    sizes = {**SHAPES[shape], **changes}
    config = AutoConfig.for_model(sizes.pop("model_type"), **sizes)
    with torch.device(device):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=attention)
    model.eval()
    return model


def random_loaded(shape: str, device: str, dtype: torch.dtype) -> LoadedModel:
    """A random model of this shape, loaded for an engine."""
    model = random_model(shape, device, dtype, PACKED_ATTENTION)
    tokenizer = Tokenizer(models.BPE())  # without tokens
    return LoadedModel(shape, model, TokenizerFiles(tokenizer.to_str().encode(), "", {}, ()), MAX_MODEL_LEN)
