"""The GPU kernels between the GEMMs of latent attention. All arithmetic is in float32 and rounds once."""

import torch

from specpool.engine.cache.arena import KVArena
from specpool.engine.numerics.triton_compat import gdc_wait, launch_options, power_of_two, tl, triton

if triton is not None:
    from specpool.engine.passes.gpu.rows import normalized, summed


def cache_latents(
    partials: torch.Tensor,  # [splits, rows, features]: queries or their latents, latents and rotary parts of keys
    bias: torch.Tensor | None,  # [features]
    norms: tuple[torch.Tensor | None, torch.Tensor],  # weights of queries' latents, if there are any, and of keys'
    rotary: tuple[torch.Tensor, torch.Tensor],  # cosines and signed sines by position, [positions, rotary]
    arena: KVArena,
    layer: int,
    positions: torch.Tensor,  # [rows]
    slots: torch.Tensor,  # [rows]; -1: do not cache the row
    offsets: torch.Tensor,  # [rows] shift of the row to the right of its position, in logical columns
    eps: float,
) -> torch.Tensor | None:
    """Normalize the latents of keys, rotate the other part, and cache both. Non-finite numbers are cached as 0.

    Return the normalized latents of queries [rows, features] if they have a norm.
    """
    keys, tables, (query_norm, latent_norm) = arena.keys[layer], arena.tables, norms
    (splits, rows, size), key_dim, rank = partials.shape, keys.shape[2], len(latent_norm)
    query_rank = 0 if query_norm is None else len(query_norm)
    latents = None if query_norm is None else keys.new_empty(rows, query_rank)
    _cache_latents[(rows, 1 if query_norm is None else 2)](
        partials, bias, query_norm, latent_norm, *rotary, positions, slots, offsets, tables, keys, latents,
        rows, tables.shape[1], eps,
        QUERY=query_rank, FIRST=size - key_dim, RANK=rank, ROTARY=key_dim - rank,
        WIDTH=power_of_two(max(query_rank, rank)), ROTARY_WIDTH=power_of_two(key_dim - rank), PAGE=arena.page_size,
        SIZE=size, SPLITS=splits, BIASED=bias is not None, **launch_options(keys.device), num_warps=4,
    )  # fmt: skip
    return latents


def split_queries(
    partials: torch.Tensor,  # [splits, rows, features]: plain parts of all heads, then their rotary parts
    bias: torch.Tensor | None,  # [features]
    rotary: tuple[torch.Tensor, torch.Tensor],  # cosines and signed sines by position, [positions, rotary]
    positions: torch.Tensor,  # [rows]
    query: torch.Tensor,  # [rows, heads, rank + rotary]
    key_dim: int,
) -> torch.Tensor:
    """Write the rotated parts of queries to the last features of `query`. Return the others [rows, heads, key_dim]."""
    (splits, rows, size), (_, heads, dim), rotary_dim = partials.shape, query.shape, rotary[0].shape[1]
    plain = query.new_empty(rows, heads, key_dim)
    _split_queries[(rows, heads)](
        partials, bias, *rotary, positions, plain, query, rows,
        HEADS=heads, KEY=key_dim, KEY_WIDTH=power_of_two(key_dim), DIM=dim, ROTARY=rotary_dim,
        ROTARY_WIDTH=power_of_two(rotary_dim), SIZE=size, SPLITS=splits, BIASED=bias is not None,
        **launch_options(query.device), num_warps=1,
    )  # fmt: skip
    return plain


if triton is not None:

    @triton.jit
    def _rotated(
        partials, bias, row, first, cosines, sines, position, rows,
        ROTARY: tl.constexpr, WIDTH: tl.constexpr, SIZE: tl.constexpr, SPLITS: tl.constexpr, BIASED: tl.constexpr,
    ):  # fmt: skip
        """Rotate the features of a row that begin at `first`. Members of a pair are half of them apart."""
        feature = tl.arange(0, WIDTH)
        mask, place = feature < ROTARY, position * ROTARY + feature
        partner = (feature + ROTARY // 2) % ROTARY
        x = summed(partials, bias, row, first + feature, mask, rows, SIZE, SPLITS, BIASED)
        y = summed(partials, bias, row, first + partner, mask, rows, SIZE, SPLITS, BIASED)
        cosine = tl.load(cosines + place, mask=mask, other=0.0).to(tl.float32)
        return x * cosine + y * tl.load(sines + place, mask=mask, other=0.0).to(tl.float32)

    @triton.jit
    def _finite(x, dtype: tl.constexpr):
        """Round to a dtype, and replace non-finite numbers by 0."""
        rounded = x.to(dtype)
        return tl.where(tl.abs(rounded.to(tl.float32)) < float("inf"), rounded, 0.0)

    @triton.jit(do_not_specialize=["rows", "pages"])
    def _cache_latents(
        partials, bias, query_norm, latent_norm, cosines, sines, positions, slots, offsets, tables, keys, latents,
        rows, pages, eps,
        QUERY: tl.constexpr, FIRST: tl.constexpr, RANK: tl.constexpr, ROTARY: tl.constexpr, WIDTH: tl.constexpr,
        ROTARY_WIDTH: tl.constexpr, PAGE: tl.constexpr, SIZE: tl.constexpr, SPLITS: tl.constexpr,
        BIASED: tl.constexpr, OVERLAP: tl.constexpr,
    ):  # fmt: skip
        """Cache a row's key, or normalize its query's latent."""
        row, feature, rotary = tl.program_id(0).to(tl.int64), tl.arange(0, WIDTH), tl.arange(0, ROTARY_WIDTH)
        if OVERLAP:
            gdc_wait()
        if tl.program_id(1) == 0:
            slot, position = tl.load(slots + row), tl.load(positions + row)
            if slot >= 0:
                mask = feature < RANK
                logical = position + tl.load(offsets + row)
                page = tl.load(tables + slot * pages + logical // PAGE).to(tl.int64)
                key = keys + (page * PAGE + logical % PAGE) * (RANK + ROTARY)
                x = summed(partials, bias, row, FIRST + feature, mask, rows, SIZE, SPLITS, BIASED)
                x = normalized(x, tl.load(latent_norm + feature, mask=mask, other=0.0), eps, RANK)
                tl.store(key + feature, _finite(x, keys.dtype.element_ty), mask=mask)
                y = _rotated(
                    partials, bias, row, FIRST + RANK, cosines, sines, position, rows, ROTARY, ROTARY_WIDTH, SIZE,
                    SPLITS, BIASED,
                )  # fmt: skip
                tl.store(key + RANK + rotary, _finite(y, keys.dtype.element_ty), mask=rotary < ROTARY)
        elif QUERY > 0:
            mask = feature < QUERY
            x = summed(partials, bias, row, feature, mask, rows, SIZE, SPLITS, BIASED)
            x = normalized(x, tl.load(query_norm + feature, mask=mask, other=0.0), eps, QUERY)
            tl.store(latents + row * QUERY + feature, x.to(latents.dtype.element_ty), mask=mask)

    @triton.jit(do_not_specialize=["rows"])
    def _split_queries(
        partials, bias, cosines, sines, positions, plain, query, rows,
        HEADS: tl.constexpr, KEY: tl.constexpr, KEY_WIDTH: tl.constexpr, DIM: tl.constexpr, ROTARY: tl.constexpr,
        ROTARY_WIDTH: tl.constexpr, SIZE: tl.constexpr, SPLITS: tl.constexpr, BIASED: tl.constexpr,
        OVERLAP: tl.constexpr,
    ):  # fmt: skip
        """Split a head of a row."""
        row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
        feature, rotary = tl.arange(0, KEY_WIDTH), tl.arange(0, ROTARY_WIDTH)
        mask, of_head = feature < KEY, row * HEADS + head
        if OVERLAP:
            gdc_wait()
        x = summed(partials, bias, row, head * KEY + feature, mask, rows, SIZE, SPLITS, BIASED)
        tl.store(plain + of_head * KEY + feature, x.to(plain.dtype.element_ty), mask=mask)
        position, first = tl.load(positions + row), HEADS * KEY + head * ROTARY
        y = _rotated(
            partials, bias, row, first, cosines, sines, position, rows, ROTARY, ROTARY_WIDTH, SIZE, SPLITS, BIASED
        )
        place = query + of_head * DIM + DIM - ROTARY + rotary
        tl.store(place, y.to(query.dtype.element_ty), mask=rotary < ROTARY)
