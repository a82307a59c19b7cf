"""One decoding step of many sequences, in buffers of fixed shape, so that a GPU can replay it as a captured graph."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import PreTrainedModel
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""Maps query [B, heads, T, head dim], key and value [B, kv heads, T, head dim] to [B, heads, T, head dim]."""

CHECKED_TOKENS = 4
LENGTH_DEPENDENT = ("dynamic", "longrope")
"""Rotary embeddings whose frequencies the host computes from the length."""
ALIGNED = 64
"""The cache's length is a multiple of this, as fast attention kernels need."""


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


class StaticDecoder:
    """Decodes a token of every sequence per step. Attention reads the whole cache, whatever the lengths."""

    def __init__(self, model: PreTrainedModel, sequences: int, length: int) -> None:
        """`length`: maximum tokens of a sequence."""
        length = -(-length // ALIGNED) * ALIGNED
        source: Any = model
        self._body, self._head = source.model, source.get_output_embeddings()
        zeros = partial(torch.zeros, _shape(model, sequences, length), device=model.device, dtype=model.dtype)
        self._cache = [(zeros(), zeros()) for _ in self._body.layers]
        self._every = torch.arange(length, device=model.device)

    @torch.no_grad()
    def step(self, token_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Logits [B, vocab_size] after these tokens [B] at these positions [B]. Earlier positions must be cached."""
        hidden = self._body.embed_tokens(token_ids[:, None])
        rotary = self._body.rotary_emb(hidden, positions[:, None])
        visible = (self._every <= positions[:, None])[:, None, None]
        for layer, cache in zip(self._body.layers, self._cache, strict=True):
            attend = partial(_attend, cache, positions, visible, layer.self_attn.scaling)
            hidden = run_layer(layer, hidden, rotary, attend)
        logits: torch.Tensor = self._head(self._body.norm(hidden[:, 0]))
        return logits


@torch.no_grad()
def decodes_like_llama(model: PreTrainedModel) -> bool:
    """Whether `StaticDecoder` computes what this model does, in a step that a graph can hold."""
    source: Any = model
    if any(kind in str(getattr(source.model.rotary_emb, "rope_type", "")) for kind in LENGTH_DEPENDENT):
        return False
    tokens = torch.arange(1, 1 + CHECKED_TOKENS, device=model.device)
    expected = model(tokens[None], use_cache=False).logits[0].float()
    try:
        decoder = StaticDecoder(model, 1, CHECKED_TOKENS)
        steps = [decoder.step(tokens[i : i + 1], torch.full_like(tokens[:1], i)) for i in range(CHECKED_TOKENS)]
    except (AttributeError, RuntimeError, TypeError):  # its layers have other parts
        return False
    distance = (torch.cat(steps).float() - expected).norm() / expected.norm()
    return bool(distance < (0.05 if model.dtype == torch.bfloat16 else 1e-3))


def bytes_per_sequence(model: PreTrainedModel, length: int) -> int:
    """Bytes of the cache of a sequence."""
    return int(2 * model.config.num_hidden_layers * _shape(model, 1, length).numel() * model.dtype.itemsize)


def _shape(model: PreTrainedModel, sequences: int, length: int) -> torch.Size:
    source: Any = model
    heads, head_dim = source.config.num_key_value_heads, source.model.layers[0].self_attn.head_dim
    return torch.Size((sequences, heads, length, head_dim))


def _attend(
    cache: tuple[torch.Tensor, torch.Tensor],
    positions: torch.Tensor,
    visible: torch.Tensor,
    scaling: float,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
) -> torch.Tensor:
    """Store keys and values at their positions, and attend. The queries of a KV head are rows of one attention."""
    for stored, new in zip(cache, (key, value), strict=True):
        stored.scatter_(2, positions[:, None, None, None].expand_as(new), new)
    grouped = query.view(len(query), key.shape[1], -1, query.shape[-1])
    mask = visible.expand(-1, 1, grouped.shape[2], -1)
    return scaled_dot_product_attention(grouped, *cache, attn_mask=mask, scale=scaling).reshape(query.shape)
