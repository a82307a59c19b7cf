"""Attention over extents on a GPU, without copying keys: split along the cache at fixed positions (flash-decoding).

The computation for a row depends on its own positions alone, so its bits are the same in every batch by construction.
"""

import logging
from typing import Any

import torch

log = logging.getLogger(__name__)

try:
    import triton
    import triton.language as tl
except ImportError:  # Triton comes with the CUDA builds of torch only
    triton = None

# Positions that one program attends to, and how many of them it loads at a time.
SPLIT, BLOCK = 512, 64
# Least number of rows of a matrix product on a GPU: the query heads that share a KV head are padded to it.
LEAST_ROWS = 16


def attends_by_kernels(device: torch.device, dtype: torch.dtype, heads: int, kv_heads: int, dim: int) -> bool:
    """Whether `attend_extents` works on this device, for these numbers of heads and this head size."""
    if device.type != "cuda" or triton is None:
        return False
    cache = torch.zeros(kv_heads, 1, dim, device=device, dtype=dtype)
    first = torch.zeros(1, dtype=torch.long).to(device)
    try:
        attend_extents(torch.zeros(1, heads, dim, device=device, dtype=dtype), cache, cache, first, first, 1.0, 1)
    except Exception as error:  # the compiler for this GPU may raise anything
        log.warning("attention is that of torch: %s", error)
        return False
    return True


def splits_for(longest: int) -> int:
    """Programs along the cache for sequences of up to `longest` positions: a power of two, so that shapes are few."""
    return 1 << (-(-longest // SPLIT) - 1).bit_length()


def attend_extents(
    query: torch.Tensor,  # [rows, heads, dim]
    keys: torch.Tensor,  # [kv_heads, columns, dim]
    values: torch.Tensor,  # [kv_heads, columns, dim]
    positions: torch.Tensor,  # [rows]
    columns: torch.Tensor,  # [rows] column of each row's own position; earlier positions lie directly before it
    scaling: float,
    splits: int,
) -> torch.Tensor:
    """Attention of every row over all positions up to its own. Returns [rows, heads, dim]."""
    rows, heads, dim = query.shape
    kv_heads, total, _ = keys.shape
    groups, query = heads // kv_heads, query.contiguous()
    shape = {"HEADS": heads, "GROUPS": groups, "DIM": dim, "SPLIT": SPLIT}
    padded = {"WIDTH": triton.next_power_of_2(dim), "HEIGHT": max(LEAST_ROWS, triton.next_power_of_2(groups))}
    parts = torch.empty(rows, splits, heads, dim, dtype=torch.float32, device=query.device)
    marks = torch.empty(2, rows, splits, heads, dtype=torch.float32, device=query.device)
    _attend_split[(rows, kv_heads, splits)](
        query, keys, values, positions, columns, parts, marks[0], marks[1], scaling, total, splits,
        **shape, **padded, BLOCK=BLOCK,
    )  # fmt: skip
    attended = torch.empty_like(query)
    _join_splits[(rows, heads)](
        parts, marks[0], marks[1], positions, attended, splits, HEADS=heads, DIM=dim, SPLIT=SPLIT, WIDTH=padded["WIDTH"]
    )
    return attended


if triton is not None:

    @triton.jit  # type: ignore[untyped-decorator]
    def _attend_split(
        query: Any, keys: Any, values: Any, positions: Any, columns: Any, parts: Any, largest: Any, weights: Any,
        scaling: Any, total: Any, splits: Any,
        HEADS: tl.constexpr, GROUPS: tl.constexpr, DIM: tl.constexpr, SPLIT: tl.constexpr,
        WIDTH: tl.constexpr, HEIGHT: tl.constexpr, BLOCK: tl.constexpr,
    ) -> None:  # fmt: skip
        """One row's query heads of one KV head over the positions of one split: weighted values, not yet normalized."""
        row, kv_head, split = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
        position = tl.load(positions + row)
        begin = split * SPLIT
        if begin <= position:
            end = tl.minimum(begin + SPLIT, position + 1)
            first = kv_head.to(tl.int64) * total + tl.load(columns + row) - position
            group, feature = tl.arange(0, HEIGHT), tl.arange(0, WIDTH)
            heads = kv_head * GROUPS + group
            known = (group[:, None] < GROUPS) & (feature[None, :] < DIM)
            q = tl.load(query + (row * HEADS + heads[:, None]) * DIM + feature[None, :], mask=known, other=0.0)
            most = tl.full([HEIGHT], float("-inf"), tl.float32)
            weight = tl.zeros([HEIGHT], tl.float32)
            summed = tl.zeros([HEIGHT, WIDTH], tl.float32)
            for at in range(begin, end, BLOCK):
                seen = at + tl.arange(0, BLOCK)
                offset = (first + seen)[:, None] * DIM + feature[None, :]
                there = (seen[:, None] < end) & (feature[None, :] < DIM)
                k = tl.load(keys + offset, mask=there, other=0.0)
                v = tl.load(values + offset, mask=there, other=0.0)
                score = tl.dot(q, tl.trans(k), input_precision="ieee") * scaling
                score = tl.where(seen[None, :] < end, score, float("-inf"))
                more = tl.maximum(most, tl.max(score, 1))
                kept = tl.exp(most - more)
                p = tl.exp(score - more[:, None])
                weight = weight * kept + tl.sum(p, 1)
                summed = summed * kept[:, None] + tl.dot(p.to(v.dtype), v, input_precision="ieee")
                most = more
            part = (row * splits + split) * HEADS + heads
            tl.store(parts + part[:, None] * DIM + feature[None, :], summed, mask=known)
            tl.store(largest + part, most, mask=group < GROUPS)
            tl.store(weights + part, weight, mask=group < GROUPS)

    @triton.jit  # type: ignore[untyped-decorator]
    def _join_splits(
        parts: Any, largest: Any, weights: Any, positions: Any, attended: Any, splits: Any,
        HEADS: tl.constexpr, DIM: tl.constexpr, SPLIT: tl.constexpr, WIDTH: tl.constexpr,
    ) -> None:  # fmt: skip
        """Joins the splits of one query head of one row, in their order."""
        row, head, feature = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.arange(0, WIDTH)
        most = tl.full([1], float("-inf"), tl.float32)
        weight = tl.zeros([1], tl.float32)
        summed = tl.zeros([WIDTH], tl.float32)
        for split in range(0, tl.load(positions + row) // SPLIT + 1):
            part = (row * splits + split) * HEADS + head
            its_most = tl.load(largest + part)
            more = tl.maximum(most, its_most)
            kept, taken = tl.exp(most - more), tl.exp(its_most - more)
            values = tl.load(parts + part * DIM + feature, mask=feature < DIM, other=0.0)
            weight = weight * kept + tl.load(weights + part) * taken
            summed = summed * kept + values * taken
            most = more
        result = (summed / weight).to(attended.dtype.element_ty)
        tl.store(attended + (row * HEADS + head) * DIM + feature, result, mask=feature < DIM)
