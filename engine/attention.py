"""Attention of packed tokens over their sequences' slots, plugged into any transformers model by its registry."""

from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

from engine.packing import AttentionCall, PackedBatch

PACKED_ATTENTION = "specpool_packed"

# Features of attention that this function does not have: a model that asks for one must not be served.
_UNSUPPORTED = ("softcap", "s_aux", "position_bias")


def packed_attention(
    module: torch.nn.Module,
    query: torch.Tensor,  # [1, heads, rows, dim]
    key: torch.Tensor,  # [1, kv_heads, rows, dim]
    value: torch.Tensor,  # [1, kv_heads, rows, dim]
    attention_mask: None,
    scaling: float | None = None,
    packed_batch: PackedBatch | None = None,
    **features: Any,
) -> tuple[torch.Tensor, None]:
    """Caches the new tokens' keys and values, then attends from them. Returns [1, rows, heads, dim].

    The signature is that of transformers' attention functions.
    """
    assert packed_batch is not None, f"{type(module).__name__} does not pass keyword arguments on to attention"
    for name in _UNSUPPORTED:
        if features.get(name) is not None:
            raise NotImplementedError(f"attention with {name}")
    window = features.get("sliding_window")
    if window is not None and window < packed_batch.longest:
        raise NotImplementedError(f"attention with sliding_window {window} at position {packed_batch.longest}")
    layer: int = module.layer_idx  # type: ignore[assignment]
    arena, tokens = packed_batch.arena, packed_batch.tokens
    arena.write(
        layer,
        packed_batch.slots,
        packed_batch.columns,
        key[0, :, :tokens].transpose(0, 1),
        value[0, :, :tokens].transpose(0, 1),
    )
    output = torch.zeros(query.shape[2], query.shape[1], query.shape[3], dtype=query.dtype, device=query.device)
    for call in packed_batch.calls:
        attended = _attend(call, query[0], arena.keys[layer], arena.values[layer], scaling)
        output[call.packed] = attended[call.rows]
    return output[None], None


def _attend(
    call: AttentionCall, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scaling: float | None
) -> torch.Tensor:
    """Attention of one call. `query` [heads, rows, dim]; returns [B * Q, heads, dim]."""
    heads, _, dim = query.shape
    kv_heads = keys.shape[1]
    batch, length = call.query_index.shape
    # Query heads that share a KV head become query rows of it, so that no key is ever copied for them.
    q = query[:, call.query_index].transpose(0, 1)  # [B, heads, Q, dim]
    q = q.reshape(batch, kv_heads, heads // kv_heads * length, dim)
    k = keys[call.slots, :, call.columns]  # [B, kv_heads, kv_length, dim]
    v = values[call.slots, :, call.columns]
    attended = scaled_dot_product_attention(q, k, v, attn_mask=call.mask, scale=scaling)
    return attended.reshape(batch, heads, length, dim).transpose(1, 2).reshape(batch * length, heads, dim)


AttentionInterface.register(PACKED_ATTENTION, packed_attention)
AttentionMaskInterface.register(PACKED_ATTENTION, lambda *_, **__: None)  # masks come with the packed batch
