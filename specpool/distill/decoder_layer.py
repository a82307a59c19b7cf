"""Runs a decoder layer of the Llama family with a custom attention function."""

from collections.abc import Callable
from typing import Any

import torch
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""Maps query [B, heads, T, head dim], key and value [B, kv heads, T, head dim] to [B, heads, T, head dim]."""


def run_layer(
    layer: Any, hidden: torch.Tensor, rotary: tuple[torch.Tensor, torch.Tensor], attend: Attend
) -> torch.Tensor:
    """Run a layer of a transformers model on hidden states [B, T, hidden]."""
    attention, normed = layer.self_attn, layer.input_layernorm(hidden)
    heads = (*normed.shape[:2], -1, attention.head_dim)
    query, key, value = (getattr(attention, name)(normed).view(heads) for name in ("q_proj", "k_proj", "v_proj"))
    if hasattr(attention, "q_norm"):
        query, key = attention.q_norm(query), attention.k_norm(key)
    query, key = apply_rotary_pos_emb(query.transpose(1, 2), key.transpose(1, 2), *rotary)
    attended = attend(query, key, value.transpose(1, 2)).transpose(1, 2).flatten(2)
    hidden = hidden + attention.o_proj(attended)
    output: torch.Tensor = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
    return output
