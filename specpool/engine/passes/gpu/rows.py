"""The GPU kernels between GEMM and attention. A program handles one row, or one head of a row.

Each program adds the partial sums of the GEMM before it, and writes the input of the next GEMM or of attention. All
arithmetic is in float32 and rounds once.
"""

from dataclasses import dataclass

import torch

from specpool.engine.cache.arena import KVArena
from specpool.engine.numerics.triton_compat import gdc_wait, launch_options, power_of_two, tl, triton
from specpool.engine.passes.kinds import SILU, Activation

if triton is not None:
    from specpool.engine.passes.gpu.functions import activated, options_of, softcapped

# Features of the intermediate state that one program computes, and of the hidden states that one warp computes.
ACTIVATED, FEATURES_PER_WARP = 1024, 256


@dataclass(frozen=True)
class Addend:
    """The output of a residual branch, to be added to the hidden states."""

    partials: torch.Tensor  # [splits, rows, hidden]
    bias: torch.Tensor | None  # [hidden]
    norm: torch.Tensor | None  # [hidden] weight of the branch's own norm


@dataclass(frozen=True)
class Recorder:
    """Memory for hidden states, and the table of layers to record, which the host may change between replays."""

    states: torch.Tensor  # [rows, slots, hidden]
    slots: torch.Tensor  # [layers + 1] index in `states` by number of layers; -1: not recorded
    num_layers: int  # before these hidden states


def add_and_norm(
    hidden: torch.Tensor,
    added: Addend | None,
    weight: torch.Tensor | None,
    eps: float,
    recorder: Recorder | None = None,
) -> torch.Tensor:
    """Add a branch to the hidden states [rows, hidden] in place, and record them if `recorder` says so.

    Return them normalized with `weight`, if given.
    """
    rows, size = hidden.shape
    normed = hidden if weight is None else torch.empty_like(hidden)
    partials, bias, norm = (None, None, None) if added is None else (added.partials, added.bias, added.norm)
    recorded = recorder or Recorder(hidden, hidden, 0)  # placeholders that the kernel will not read
    _add_and_norm[(rows,)](
        hidden, _or(partials, hidden), _or(bias, hidden), _or(norm, hidden), _or(weight, hidden), normed,
        recorded.states, recorded.slots, eps, rows, recorded.num_layers, recorded.states.shape[1],
        SIZE=size, WIDTH=power_of_two(size), SPLITS=0 if partials is None else len(partials), BIASED=bias is not None,
        INNER=norm is not None, NORMED=weight is not None, RECORDED=recorder is not None,
        **launch_options(hidden.device), num_warps=warps_of(size),
    )  # fmt: skip
    return normed


def rotate_and_cache(
    partials: torch.Tensor,  # [splits, rows, features]: queries, keys and values, possibly others
    bias: torch.Tensor | None,  # [features]
    norms: torch.Tensor | None,  # [heads + kv_heads, dim] weights of the head norms
    rotary: tuple[torch.Tensor, torch.Tensor],  # cosines and signed sines by position, [positions, dim]
    arena: KVArena,
    layer: int,
    positions: torch.Tensor,  # [rows]
    slots: torch.Tensor,  # [rows]; -1: do not cache the row
    offsets: torch.Tensor,  # [rows] shift of the row to the right of its position, in logical columns
    heads: int,
    eps: float,
) -> torch.Tensor:
    """Normalize and rotate queries and keys, then cache keys and values. Return the queries [rows, heads, dim].

    Non-finite numbers are cached as 0: attention gives masked keys a weight of 0, and 0 * inf is NaN.
    """
    keys, values, tables = arena.keys[layer], arena.values[layer], arena.tables
    kv_heads, columns, dim = keys.shape
    rows = partials.shape[1]
    query = torch.empty(rows, heads, dim, dtype=keys.dtype, device=keys.device)
    _rotate_and_cache[(rows, heads + 2 * kv_heads)](
        partials, _or(bias, partials), _or(norms, partials), *rotary, positions, slots, offsets, tables,
        query, keys, values, rows, columns, tables.shape[1], eps,
        HEADS=heads, KV_HEADS=kv_heads, DIM=dim, WIDTH=power_of_two(dim), PAGE=arena.page_size, SIZE=partials.shape[2],
        SPLITS=len(partials), BIASED=bias is not None, NORMED=norms is not None,
        **launch_options(query.device), num_warps=1,
    )  # fmt: skip
    return query


def activate(
    partials: torch.Tensor,  # [splits, rows, 2 * size]: gate and up
    bias: torch.Tensor | None,  # [2 * size]
    dtype: torch.dtype,
    activation: Activation = SILU,
) -> torch.Tensor:
    """Combine gate and up. Return [rows, size] in `dtype`."""
    rows, size = partials.shape[1], partials.shape[2] // 2
    result = torch.empty(rows, size, dtype=dtype, device=partials.device)
    _activate[(rows, -(-size // ACTIVATED))](
        partials, _or(bias, partials), result, rows,
        SIZE=size, WIDTH=ACTIVATED, SPLITS=len(partials), BIASED=bias is not None, **options_of(activation),
        **launch_options(partials.device), num_warps=4,
    )  # fmt: skip
    return result


def cap_logits(logits: torch.Tensor, softcap: float) -> torch.Tensor:
    """Apply softcap * tanh(logit / softcap) in place. Return `logits` [rows, outputs]."""
    rows, size = logits.shape
    _cap_logits[(rows, -(-size // ACTIVATED))](
        logits, SIZE=size, WIDTH=ACTIVATED, SOFTCAP=softcap, **launch_options(logits.device), num_warps=4
    )
    return logits


def warps_of(size: int) -> int:
    """Warps of a program that handles a row of hidden states."""
    return min(16, max(1, power_of_two(size) // FEATURES_PER_WARP))


def _or(tensor: torch.Tensor | None, unread: torch.Tensor) -> torch.Tensor:
    """The tensor, or a placeholder that the kernel will not read."""
    return unread if tensor is None else tensor


if triton is not None:

    @triton.jit
    def summed(
        partials, bias, row, feature, mask, rows, SIZE: tl.constexpr, SPLITS: tl.constexpr, BIASED: tl.constexpr
    ):
        """Features of a GEMM's row: its partial sums added in order, then the bias."""
        place = partials + row * SIZE + feature
        total = tl.load(place, mask=mask, other=0.0).to(tl.float32)
        for split in tl.static_range(1, SPLITS):
            total += tl.load(place + split * rows.to(tl.int64) * SIZE, mask=mask, other=0.0).to(tl.float32)
        if BIASED:
            total += tl.load(bias + feature, mask=mask, other=0.0).to(tl.float32)
        return total

    @triton.jit
    def _scale(x, eps, SIZE: tl.constexpr):
        """The RMSNorm factor of a row, whose masked features are 0."""
        return tl.rsqrt(tl.sum(x * x, 0) / SIZE + eps)

    @triton.jit
    def normalized(x, weight, eps, SIZE: tl.constexpr):
        """The RMSNorm of a row, whose masked features are 0."""
        return x * _scale(x, eps, SIZE) * weight.to(tl.float32)

    @triton.jit(do_not_specialize=["rows", "num_layers", "num_slots"])
    def _add_and_norm(
        hidden, partials, bias, norm, weight, normed, states, slots, eps, rows, num_layers, num_slots,
        SIZE: tl.constexpr, WIDTH: tl.constexpr, SPLITS: tl.constexpr, BIASED: tl.constexpr, INNER: tl.constexpr,
        NORMED: tl.constexpr, RECORDED: tl.constexpr, OVERLAP: tl.constexpr,
    ):  # fmt: skip
        row, feature = tl.program_id(0).to(tl.int64), tl.arange(0, WIDTH)
        mask = feature < SIZE
        if NORMED:
            factors = tl.load(weight + feature, mask=mask, other=0.0)
        if INNER:
            inner_factors = tl.load(norm + feature, mask=mask, other=0.0)
        if OVERLAP:
            gdc_wait()
        if RECORDED:
            slot = tl.load(slots + num_layers)
        own = hidden + row * SIZE + feature
        x = tl.load(own, mask=mask, other=0.0).to(tl.float32)
        if SPLITS > 0:
            added = summed(partials, bias, row, feature, mask, rows, SIZE, SPLITS, BIASED)
            if INNER:
                added = normalized(added, inner_factors, eps, SIZE)
            rounded = (x + added).to(hidden.dtype.element_ty)
            tl.store(own, rounded, mask=mask)
            x = rounded.to(tl.float32)
        if NORMED:
            result = normalized(x, factors, eps, SIZE)
            tl.store(normed + row * SIZE + feature, result.to(normed.dtype.element_ty), mask=mask)
        if RECORDED:
            place = states + (row * num_slots + slot) * SIZE + feature
            tl.store(place, x.to(states.dtype.element_ty), mask=mask & (slot >= 0))

    @triton.jit(do_not_specialize=["rows", "columns", "pages"])
    def _rotate_and_cache(
        partials, bias, norms, cosines, sines, positions, slots, offsets, tables, query, keys, values,
        rows, columns, pages, eps,
        HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr, PAGE: tl.constexpr,
        SIZE: tl.constexpr, SPLITS: tl.constexpr, BIASED: tl.constexpr, NORMED: tl.constexpr, OVERLAP: tl.constexpr,
    ):  # fmt: skip
        if OVERLAP:
            gdc_wait()
        row, head, feature = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.arange(0, WIDTH)
        mask = feature < DIM
        position, slot = tl.load(positions + row), tl.load(slots + row)
        is_cached = (head >= HEADS) & (slot >= 0)
        logical = position + tl.load(offsets + row, mask=is_cached, other=0)
        page = tl.load(tables + slot * pages + logical // PAGE, mask=is_cached, other=0).to(tl.int64)
        x = summed(partials, bias, row, head * DIM + feature, mask, rows, SIZE, SPLITS, BIASED)
        if head < HEADS + KV_HEADS:
            # The other member of a rotary pair is half a head away and shares the head's norm.
            partner = (feature + DIM // 2) % DIM
            y = summed(partials, bias, row, head * DIM + partner, mask, rows, SIZE, SPLITS, BIASED)
            if NORMED:
                scale = _scale(x, eps, DIM)
                x = x * scale * tl.load(norms + head * DIM + feature, mask=mask, other=0.0).to(tl.float32)
                y = y * scale * tl.load(norms + head * DIM + partner, mask=mask, other=0.0).to(tl.float32)
            place = position * DIM + feature
            cosine = tl.load(cosines + place, mask=mask, other=0.0).to(tl.float32)
            sine = tl.load(sines + place, mask=mask, other=0.0).to(tl.float32)
            x = x * cosine + y * sine
        rounded = x.to(keys.dtype.element_ty)
        if head < HEADS:
            tl.store(query + (row * HEADS + head) * DIM + feature, rounded, mask=mask)
        elif is_cached:
            column = page * PAGE + logical % PAGE
            finite = tl.where(tl.abs(rounded.to(tl.float32)) < float("inf"), rounded, 0.0)
            if head < HEADS + KV_HEADS:
                place = ((head - HEADS) * columns.to(tl.int64) + column) * DIM + feature
                tl.store(keys + place, finite, mask=mask)
            else:
                place = ((head - HEADS - KV_HEADS) * columns.to(tl.int64) + column) * DIM + feature
                tl.store(values + place, finite, mask=mask)

    @triton.jit(do_not_specialize=["rows"])
    def _activate(
        partials, bias, result, rows,
        SIZE: tl.constexpr, WIDTH: tl.constexpr, SPLITS: tl.constexpr, BIASED: tl.constexpr, GELU: tl.constexpr,
        ALPHA: tl.constexpr, LIMIT: tl.constexpr, SHIFT: tl.constexpr, OVERLAP: tl.constexpr,
    ):  # fmt: skip
        if OVERLAP:
            gdc_wait()
        row, feature = tl.program_id(0).to(tl.int64), tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
        mask = feature < SIZE
        gate = summed(partials, bias, row, feature, mask, rows, 2 * SIZE, SPLITS, BIASED)
        up = summed(partials, bias, row, SIZE + feature, mask, rows, 2 * SIZE, SPLITS, BIASED)
        combined = activated(gate, up, GELU, ALPHA, LIMIT, SHIFT)
        tl.store(result + row * SIZE + feature, combined.to(result.dtype.element_ty), mask=mask)

    @triton.jit
    def _cap_logits(logits, SIZE: tl.constexpr, WIDTH: tl.constexpr, SOFTCAP: tl.constexpr, OVERLAP: tl.constexpr):
        if OVERLAP:
            gdc_wait()
        row, feature = tl.program_id(0).to(tl.int64), tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
        place, mask = logits + row * SIZE + feature, feature < SIZE
        capped = softcapped(tl.load(place, mask=mask, other=0.0).to(tl.float32), SOFTCAP)
        tl.store(place, capped.to(logits.dtype.element_ty), mask=mask)
