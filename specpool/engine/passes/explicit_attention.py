"""Batch-invariant attention with sinks or soft caps, which torch's attention does not support.

Masked positions add zeros, so a row's sums do not depend on the positions attended by other rows.
"""

import torch

from specpool.engine.passes.modules import VECTOR_ELEMENTS, in_chunks, softcapped

TILE = 64
"""Columns of a tile. A row of this many scores fills whole vectors."""
MAX_ELEMENTS = 2**22
"""Maximum number of elements in the products of one tile."""


def attend_explicitly(
    query: torch.Tensor,  # [B, kv_heads, rows, dim]
    key: torch.Tensor,  # [B, kv_heads, columns, dim]
    value: torch.Tensor,  # [B, kv_heads, columns, dim]
    visible: torch.Tensor,  # [B, 1, rows, columns]
    scaling: float,
    sinks: torch.Tensor,  # [B, kv_heads, rows] float32; -inf: no sink
    softcap: float | None,
) -> torch.Tensor:
    """Attend with sinks, capped scores or both. Return [B, kv_heads, rows, dim]."""
    if softcap is None and query.device.type == "cpu":
        return _attend_with_sinks(query, key, value, visible, scaling, sinks)
    axis = 0 if len(query) > 1 else 2
    if query.numel() * TILE <= MAX_ELEMENTS or query.shape[axis] == 1:
        return _attend_by_tiles(query, key, value, visible, scaling, sinks, softcap)
    by_sequence = [each.chunk(2) if axis == 0 else (each, each) for each in (key, value)]
    parts = zip(query.chunk(2, axis), *by_sequence, visible.chunk(2, axis), sinks.chunk(2, axis), strict=True)
    halves = [attend_explicitly(q, k, v, seen, scaling, sink, softcap) for q, k, v, seen, sink in parts]
    return torch.cat(halves, axis)


def _attend_with_sinks(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    visible: torch.Tensor,
    scaling: float,
    sinks: torch.Tensor,
) -> torch.Tensor:
    """Attend with torch's CPU kernel, and rescale the result by its log-sum-exp."""
    bias = torch.zeros(visible.shape, dtype=query.dtype).masked_fill_(~visible, -torch.inf)
    attended, total = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        query, key, value, attn_mask=bias, scale=scaling
    )
    # Share of the softmax that is left beside the sink: exp(total) / (exp(total) + exp(sink)).
    share = in_chunks(torch.sigmoid, _vectors(total - sinks))[..., :1]
    weighted: torch.Tensor = (attended * share).to(query.dtype)
    return weighted


def _attend_by_tiles(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    visible: torch.Tensor,
    scaling: float,
    sinks: torch.Tensor,
    softcap: float | None,
) -> torch.Tensor:
    """Attend tile by tile, in float32.

    Equally shaped tiles are added in order. Elementwise products and sums along one axis keep their bits in any batch,
    unlike a batched GEMM.
    """
    tiles = [slice(first, first + TILE) for first in range(0, key.shape[2], TILE)]
    q = query.float().contiguous()[:, :, :, None]
    scores = []
    for tile in tiles:
        score = (q * key[:, :, None, tile].float().contiguous()).sum(-1) * scaling  # [B, kv_heads, rows, TILE]
        if softcap is not None:
            score = softcapped(score, softcap)
        scores.append(score.masked_fill(~visible[..., tile], -torch.inf))
    peak = torch.stack([sinks, *(score.amax(-1) for score in scores)]).amax(0)
    total = in_chunks(torch.exp, _vectors(sinks - peak))[..., 0]
    attended = torch.zeros_like(q[:, :, :, 0])
    for tile, score in zip(tiles, scores, strict=True):
        weight = in_chunks(torch.exp, score - peak[..., None])
        total = total + weight.sum(-1)
        attended = attended + (weight[..., None] * value[:, :, None, tile].float().contiguous()).sum(-2)
    return (attended / total[..., None]).to(query.dtype)


def _vectors(x: torch.Tensor) -> torch.Tensor:
    """Repeat each number to fill a vector, so that no function computes it in a scalar tail."""
    return x[..., None].expand(*x.shape, VECTOR_ELEMENTS).contiguous()
