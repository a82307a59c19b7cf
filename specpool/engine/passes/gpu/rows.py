"""Kernels between products and attention of a layer on a GPU: one program for each row, or each head of each row.

A program adds up the parts of the product before it, and writes what the next product or attention reads. Sums and
functions are computed in float32 and rounded once.
"""

from dataclasses import dataclass

import torch

from specpool.engine.cache.arena import KVArena
from specpool.engine.numerics.triton_compat import UNFUSED, power_of_two, tl, triton

# Features of the intermediate state that one program computes.
ACTIVATED = 1024


@dataclass(frozen=True)
class Addend:
    """A product to be added to the hidden states."""

    parts: torch.Tensor  # [parts, rows, hidden]
    bias: torch.Tensor | None  # [hidden]
    norm: torch.Tensor | None  # [hidden] weight of a norm of the product itself, before it is added


def add_and_norm(hidden: torch.Tensor, added: Addend | None, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Adds a product to the hidden states [rows, hidden] in place. Returns them normalized with this weight."""
    rows, size = hidden.shape
    normed = torch.empty_like(hidden)
    parts, bias, norm = (None, None, None) if added is None else (added.parts, added.bias, added.norm)
    _add_and_norm[(rows,)](
        hidden, _or(parts, hidden), _or(bias, hidden), _or(norm, hidden), weight, normed, eps, rows,
        SIZE=size, WIDTH=power_of_two(size), PARTS=0 if parts is None else len(parts), BIASED=bias is not None,
        INNER=norm is not None, **UNFUSED, num_warps=min(16, max(1, power_of_two(size) // 512)),
    )  # fmt: skip
    return normed


def rotate_and_cache(
    parts: torch.Tensor,  # [parts, rows, (heads + 2 kv_heads) * dim]: queries, keys and values
    bias: torch.Tensor | None,  # [(heads + 2 kv_heads) * dim]
    norms: torch.Tensor | None,  # [heads + kv_heads, dim] weights of the norms of heads
    rotary: tuple[torch.Tensor, torch.Tensor],  # cosines and signed sines by position, [positions, dim]
    arena: KVArena,
    layer: int,
    positions: torch.Tensor,  # [rows]
    columns: torch.Tensor,  # [rows]; -1: the row is not cached
    heads: int,
    eps: float,
) -> torch.Tensor:
    """Normalizes and rotates queries and keys, and caches keys and values. Returns the queries [rows, heads, dim].

    Numbers that are not finite are cached as 0: a row of the same tile of attention gives them a weight of zero, and
    zero times an overflow is not zero.
    """
    keys, values = arena.keys[layer], arena.values[layer]
    kv_heads, total, dim = keys.shape
    rows = parts.shape[1]
    query = torch.empty(rows, heads, dim, dtype=keys.dtype, device=keys.device)
    _rotate_and_cache[(rows, heads + 2 * kv_heads)](
        parts, _or(bias, parts), _or(norms, parts), *rotary, positions, columns,
        query, keys, values, rows, total, eps,
        HEADS=heads, KV_HEADS=kv_heads, DIM=dim, WIDTH=power_of_two(dim), PARTS=len(parts), BIASED=bias is not None,
        NORMED=norms is not None, **UNFUSED, num_warps=1,
    )  # fmt: skip
    return query


def activate(
    parts: torch.Tensor,  # [parts, rows, 2 * size]: gate and up
    bias: torch.Tensor | None,  # [2 * size]
    dtype: torch.dtype,
) -> torch.Tensor:
    """silu(gate) * up, [rows, size], in this dtype."""
    rows, size = parts.shape[1], parts.shape[2] // 2
    activated = torch.empty(rows, size, dtype=dtype, device=parts.device)
    _activate[(rows, -(-size // ACTIVATED))](
        parts, _or(bias, parts), activated, rows,
        SIZE=size, WIDTH=ACTIVATED, PARTS=len(parts), BIASED=bias is not None, **UNFUSED, num_warps=4,
    )  # fmt: skip
    return activated


def _or(tensor: torch.Tensor | None, other: torch.Tensor) -> torch.Tensor:
    """A tensor that a kernel can be given in place of one that it does not read."""
    return other if tensor is None else tensor


if triton is not None:

    @triton.jit
    def _summed(parts, bias, row, feature, known, rows, SIZE: tl.constexpr, PARTS: tl.constexpr, BIASED: tl.constexpr):
        """Features of a row of a product: its parts added up in their order, and the bias."""
        place = parts + row * SIZE + feature
        total = tl.load(place, mask=known, other=0.0).to(tl.float32)
        for part in tl.static_range(1, PARTS):
            total += tl.load(place + part * rows.to(tl.int64) * SIZE, mask=known, other=0.0).to(tl.float32)
        if BIASED:
            total += tl.load(bias + feature, mask=known, other=0.0).to(tl.float32)
        return total

    @triton.jit
    def _scale(x, eps, SIZE: tl.constexpr):
        """The factor of the root-mean-square norm of a row, whose masked features are 0."""
        return tl.rsqrt(tl.sum(x * x, 0) / SIZE + eps)

    @triton.jit
    def _normed(x, weight, feature, known, eps, SIZE: tl.constexpr):
        """The root-mean-square norm of a row, whose masked features are 0."""
        return x * _scale(x, eps, SIZE) * tl.load(weight + feature, mask=known, other=0.0).to(tl.float32)

    @triton.jit(do_not_specialize=["rows"])
    def _add_and_norm(
        hidden, parts, bias, norm, weight, normed, eps, rows,
        SIZE: tl.constexpr, WIDTH: tl.constexpr, PARTS: tl.constexpr, BIASED: tl.constexpr, INNER: tl.constexpr,
    ):  # fmt: skip
        row, feature = tl.program_id(0).to(tl.int64), tl.arange(0, WIDTH)
        known = feature < SIZE
        own = hidden + row * SIZE + feature
        x = tl.load(own, mask=known, other=0.0).to(tl.float32)
        if PARTS > 0:
            added = _summed(parts, bias, row, feature, known, rows, SIZE, PARTS, BIASED)
            if INNER:
                added = _normed(added, norm, feature, known, eps, SIZE)
            rounded = (x + added).to(hidden.dtype.element_ty)
            tl.store(own, rounded, mask=known)
            x = rounded.to(tl.float32)
        result = _normed(x, weight, feature, known, eps, SIZE)
        tl.store(normed + row * SIZE + feature, result.to(normed.dtype.element_ty), mask=known)

    @triton.jit(do_not_specialize=["rows", "total"])
    def _rotate_and_cache(
        parts, bias, norms, cosines, sines, positions, columns, query, keys, values, rows, total, eps,
        HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr, PARTS: tl.constexpr,
        BIASED: tl.constexpr, NORMED: tl.constexpr,
    ):  # fmt: skip
        row, head, feature = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.arange(0, WIDTH)
        known, size = feature < DIM, (HEADS + 2 * KV_HEADS) * DIM
        column = tl.load(columns + row)
        x = _summed(parts, bias, row, head * DIM + feature, known, rows, size, PARTS, BIASED)
        if head < HEADS + KV_HEADS:
            # The other member of the rotary pair is half a head away; its norm is that of the same head.
            partner = (feature + DIM // 2) % DIM
            y = _summed(parts, bias, row, head * DIM + partner, known, rows, size, PARTS, BIASED)
            if NORMED:
                scale = _scale(x, eps, DIM)
                x = x * scale * tl.load(norms + head * DIM + feature, mask=known, other=0.0).to(tl.float32)
                y = y * scale * tl.load(norms + head * DIM + partner, mask=known, other=0.0).to(tl.float32)
            place = tl.load(positions + row) * DIM + feature
            cosine = tl.load(cosines + place, mask=known, other=0.0).to(tl.float32)
            sine = tl.load(sines + place, mask=known, other=0.0).to(tl.float32)
            x = x * cosine + y * sine
        rounded = x.to(keys.dtype.element_ty)
        if head < HEADS:
            tl.store(query + (row * HEADS + head) * DIM + feature, rounded, mask=known)
        elif column >= 0:
            finite = tl.where(tl.abs(rounded.to(tl.float32)) < float("inf"), rounded, 0.0)
            if head < HEADS + KV_HEADS:
                place = ((head - HEADS) * total.to(tl.int64) + column) * DIM + feature
                tl.store(keys + place, finite, mask=known)
            else:
                place = ((head - HEADS - KV_HEADS) * total.to(tl.int64) + column) * DIM + feature
                tl.store(values + place, finite, mask=known)

    @triton.jit(do_not_specialize=["rows"])
    def _activate(
        parts, bias, activated, rows,
        SIZE: tl.constexpr, WIDTH: tl.constexpr, PARTS: tl.constexpr, BIASED: tl.constexpr,
    ):  # fmt: skip
        row, feature = tl.program_id(0).to(tl.int64), tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
        known = feature < SIZE
        gate = _summed(parts, bias, row, feature, known, rows, 2 * SIZE, PARTS, BIASED)
        up = _summed(parts, bias, row, SIZE + feature, known, rows, 2 * SIZE, PARTS, BIASED)
        result = gate / (1 + tl.exp(-gate)) * up
        tl.store(activated + row * SIZE + feature, result.to(activated.dtype.element_ty), mask=known)
