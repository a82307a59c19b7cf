"""Attention over extents on a GPU, without copying keys: split along the cache at fixed positions (flash-decoding).

The rows of a sequence that follow each other share a tile, with all query heads that share a KV head, so that keys and
values are read once for them. What is computed for a row depends on its own positions alone: splits and blocks begin at
fixed positions, and a block in which a row sees nothing adds nothing to it. So its bits are the same in every batch.
"""

import torch

from specpool.engine.numerics.triton_compat import UNFUSED, is_wide, power_of_two, tl, triton

# Positions of a split, and how many of them are loaded at a time. Splits are joined in their order.
SPLIT, BLOCK = 256, 64
# Programs that should keep a GPU busy. From there on each handles all splits of its tile, which saves a kernel.
BUSY = 512
# With larger heads, the sums of a split and of all splits do not fit into a program's registers together.
LARGEST_SERIAL = 128


def splits_for(longest: int) -> int:
    """Splits of sequences of up to `longest` positions: a power of two, so that shapes are few."""
    return power_of_two(-(-longest // SPLIT))


def tile_height(dtype: torch.dtype, groups: int) -> int:
    """Query rows of a tile, each of one head. `groups`: query heads per KV head."""
    # Tensor cores of an sm_90 multiply 64 rows at a time; without them registers are the limit.
    return max(16 if is_wide(dtype) else 64, power_of_two(groups))


def rows_per_tile(dtype: torch.dtype, groups: int) -> int:
    """Most rows of a sequence that share a tile."""
    return tile_height(dtype, groups) // groups


def attend_extents(
    query: torch.Tensor,  # [rows, heads, dim]; rows of a tile are replaced by the result
    keys: torch.Tensor,  # [kv_heads, columns, dim]
    values: torch.Tensor,  # [kv_heads, columns, dim]
    tile_begins: torch.Tensor,  # [tiles] first row
    tile_sizes: torch.Tensor,  # [tiles] how many rows, at positions that follow each other; 0: none
    positions: torch.Tensor,  # [rows]
    columns: torch.Tensor,  # [rows] column of each row's own position; earlier positions lie directly before it
    scaling: float,
    splits: int,
) -> torch.Tensor:
    """Attention of every row in a tile over all positions up to its own, in place. Returns `query`."""
    rows, heads, dim = query.shape
    kv_heads, total, _ = keys.shape
    groups = heads // kv_heads
    width, height = power_of_two(dim), tile_height(query.dtype, groups)
    shape = {"HEADS": heads, "GROUPS": groups, "DIM": dim, "WIDTH": width, "SPLIT": SPLIT}
    tiles = len(tile_begins)
    serial = width <= LARGEST_SERIAL and (splits == 1 or tiles * kv_heads >= BUSY)
    parts = marks = query  # not used by programs that handle all splits
    if not serial:
        parts = torch.empty(rows, splits, heads, dim, dtype=torch.float32, device=query.device)
        marks = torch.empty(2, rows, splits, heads, dtype=torch.float32, device=query.device)
    _attend[(tiles, kv_heads, 1 if serial else splits)](
        query, keys, values, tile_begins, tile_sizes, positions, columns, parts, marks, scaling, total, splits, rows,
        **shape, HEIGHT=height, BLOCK=_block(query.dtype, width), SERIAL=serial,
        **UNFUSED, num_warps=_warps(query.dtype, width), num_stages=_stages(query.dtype, width),
    )  # fmt: skip
    if not serial:
        _join_splits[(rows, heads)](
            parts, marks, positions, columns, query, splits, **shape, **UNFUSED, num_warps=1
        )  # fmt: skip
    return query


def scratch_bytes(rows: int, longest: int, heads: int, kv_heads: int, dim: int, most_rows: int) -> int:
    """Bytes of the splits that are written and joined, in the largest pass of up to `rows` rows that does so.

    `most_rows`: most rows of a tile.
    """
    splits = splits_for(longest)
    if power_of_two(dim) <= LARGEST_SERIAL:
        rows = 0 if splits == 1 else min(rows, most_rows * BUSY // kv_heads)
    return rows * splits * heads * (dim + 2) * torch.float32.itemsize


def _warps(dtype: torch.dtype, width: int) -> int:
    return 8 if is_wide(dtype) or width > 64 else 4  # with 4, larger heads do not fit into registers


def _block(dtype: torch.dtype, width: int) -> int:
    return min(BLOCK, max(16, 2048 // width)) if is_wide(dtype) else BLOCK


def _stages(dtype: torch.dtype, width: int) -> int:
    return 1 if is_wide(dtype) else 3 if width <= LARGEST_SERIAL else 2


if triton is not None:
    # Below every score, but not infinite: what a row does not see then has a weight of exactly zero, in any order.
    LOWEST = tl.constexpr(-1e30)

    @triton.jit
    def _attend_split(
        q, keys, values, first, begin, end, visible, scaling,
        DIM: tl.constexpr, WIDTH: tl.constexpr, HEIGHT: tl.constexpr, BLOCK: tl.constexpr,
    ):  # fmt: skip
        """A tile over the positions of one split: weighted values, not yet normalized; largest scores; weights."""
        feature = tl.arange(0, WIDTH)
        most = tl.full([HEIGHT], LOWEST, tl.float32)
        weight = tl.zeros([HEIGHT], tl.float32)
        summed = tl.zeros([HEIGHT, WIDTH], tl.float32)
        for at in range(begin, end, BLOCK):
            seen = at + tl.arange(0, BLOCK)
            offset = (first + seen)[:, None] * DIM + feature[None, :]
            there = (seen[:, None] < end) & (feature[None, :] < DIM)
            k = tl.load(keys + offset, mask=there, other=0.0)
            v = tl.load(values + offset, mask=there, other=0.0)
            score = tl.dot(q, tl.trans(k), input_precision="ieee") * scaling
            score = tl.where(seen[None, :] <= visible[:, None], score, float("-inf"))
            more = tl.maximum(most, tl.max(score, 1))
            kept = tl.exp(most - more)
            p = tl.exp(score - more[:, None])
            weight = weight * kept + tl.sum(p, 1)
            summed = summed * kept[:, None] + tl.dot(p.to(v.dtype), v, input_precision="ieee")
            most = more
        return summed, most, weight

    @triton.jit(do_not_specialize=["splits", "total", "rows"])
    def _attend(
        query, keys, values, tile_begins, tile_sizes, positions, columns, parts, marks, scaling, total, splits, rows,
        HEADS: tl.constexpr, GROUPS: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr, SPLIT: tl.constexpr,
        HEIGHT: tl.constexpr, BLOCK: tl.constexpr, SERIAL: tl.constexpr,
    ):  # fmt: skip
        """The query heads of one KV head, of the rows of one tile, over one split or over all of them."""
        tile, kv_head = tl.program_id(0), tl.program_id(1)
        count = tl.load(tile_sizes + tile).to(tl.int32)
        if count > 0:
            row = tl.load(tile_begins + tile)
            position = tl.load(positions + row).to(tl.int32)
            first = kv_head.to(tl.int64) * total + tl.load(columns + row) - position
            line, feature = tl.arange(0, HEIGHT), tl.arange(0, WIDTH)
            own, head = line // GROUPS, kv_head * GROUPS + line % GROUPS
            visible = position + own
            known = (own < count)[:, None] & (feature < DIM)[None, :]
            place = ((row + own) * HEADS + head)[:, None] * DIM + feature[None, :]
            q = tl.load(query + place, mask=known, other=0.0)
            if SERIAL:
                most = tl.full([HEIGHT], LOWEST, tl.float32)
                weight = tl.zeros([HEIGHT], tl.float32)
                summed = tl.zeros([HEIGHT, WIDTH], tl.float32)
                for begin in range(0, position + count, SPLIT):
                    end = tl.minimum(begin + SPLIT, position + count)
                    its_summed, its_most, its_weight = _attend_split(
                        q, keys, values, first, begin, end, visible, scaling, DIM, WIDTH, HEIGHT, BLOCK
                    )
                    more = tl.maximum(most, its_most)
                    kept, taken = tl.exp(most - more), tl.exp(its_most - more)
                    weight = weight * kept + its_weight * taken
                    summed = summed * kept[:, None] + its_summed * taken[:, None]
                    most = more
                tl.store(query + place, (summed / weight[:, None]).to(query.dtype.element_ty), mask=known)
            else:
                split = tl.program_id(2)
                begin = split * SPLIT
                if begin < position + count:
                    end = tl.minimum(begin + SPLIT, position + count)
                    summed, most, weight = _attend_split(
                        q, keys, values, first, begin, end, visible, scaling, DIM, WIDTH, HEIGHT, BLOCK
                    )
                    part = ((row + own) * splits + split) * HEADS + head
                    tl.store(parts + part[:, None] * DIM + feature[None, :], summed, mask=known)
                    tl.store(marks + part, most, mask=own < count)
                    weights = marks + rows.to(tl.int64) * splits * HEADS
                    tl.store(weights + part, weight, mask=own < count)

    @triton.jit(do_not_specialize=["splits"])
    def _join_splits(
        parts, marks, positions, columns, attended, splits,
        HEADS: tl.constexpr, GROUPS: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr, SPLIT: tl.constexpr,
    ):  # fmt: skip
        """Joins the splits of one query head of one row, in their order."""
        row, head, feature = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.arange(0, WIDTH)
        if tl.load(columns + row) >= 0:
            weights = marks + tl.num_programs(0).to(tl.int64) * splits * HEADS
            most = tl.full([1], LOWEST, tl.float32)
            weight = tl.zeros([1], tl.float32)
            summed = tl.zeros([WIDTH], tl.float32)
            for split in range(0, tl.load(positions + row).to(tl.int32) // SPLIT + 1):
                part = (row * splits + split) * HEADS + head
                its_most = tl.load(marks + part)
                more = tl.maximum(most, its_most)
                kept, taken = tl.exp(most - more), tl.exp(its_most - more)
                values = tl.load(parts + part * DIM + feature, mask=feature < DIM, other=0.0)
                weight = weight * kept + tl.load(weights + part) * taken
                summed = summed * kept + values * taken
                most = more
            result = (summed / weight).to(attended.dtype.element_ty)
            tl.store(attended + (row * HEADS + head) * DIM + feature, result, mask=feature < DIM)
