"""A random pair of models, small enough to decode hundreds of tokens per second, saved as real model folders."""

from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.pair import save_tokenizer
from specpool.testing import EOS_TOKEN_ID, VOCAB_SIZE

MAX_MODEL_LEN = 512


def tiny_config(**changes: Any) -> LlamaConfig:
    """A configuration with three query heads per KV head and two KV heads, as odd as those of real models."""
    sizes: dict[str, Any] = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 96,
        "intermediate_size": 160,
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": MAX_MODEL_LEN,
        "eos_token_id": EOS_TOKEN_ID,
        "bos_token_id": None,
        "tie_word_embeddings": False,
    }
    return LlamaConfig(**{**sizes, **changes})


def make_tiny_pair(folder: Path, **changes: Any) -> tuple[Path, Path]:
    """Saves a target, and a draft that agrees with it often but not always; returns their folders.

    `changes`: of `tiny_config`.
    """
    torch.manual_seed(0)
    target = LlamaForCausalLM(tiny_config(**changes))
    with torch.no_grad():
        for weight in target.parameters():
            if weight.dim() > 1:
                weight.normal_(std=0.12)
    target.save_pretrained(folder / "target")
    with torch.no_grad():
        for weight in target.parameters():
            if weight.dim() > 1:
                weight.add_(torch.randn_like(weight), alpha=0.005)
    target.save_pretrained(folder / "draft")
    for name in ("target", "draft"):
        save_tokenizer(folder / name)
    return folder / "target", folder / "draft"
