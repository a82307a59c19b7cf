"""Attention over the pages of sequences on a GPU: splits of fixed length, combined in order (flash-decoding).

Consecutive rows of a sequence share a tile with all query heads of a KV head, so keys and values are read once for
them. A row's bits depend only on its positions, not on where its pages lie: splits and blocks start at fixed
positions, and a block that a row does not see adds exactly zero. A tile skips blocks that end before the window of its
first row.
"""

import torch

from specpool.engine.cache.arena import KVArena
from specpool.engine.numerics.triton_compat import (
    HOPPER,
    architecture,
    gdc_wait,
    is_wide,
    launch_options,
    power_of_two,
    tl,
    triton,
)
from specpool.engine.passes.kinds import FULL_ATTENTION, AttentionKind

if triton is not None:
    from specpool.engine.passes.gpu.functions import softcapped

# Positions per split, and positions loaded at a time. Splits are combined in order. A block inside one page needs a
# single page table entry; any other block looks up each position.
SPLIT, BLOCK = 256, 64
# Elements of a head's keys that the kernel can address.
MAX_ELEMENTS = 2**31
# Programs that keep a GPU busy. From here on, one program handles all splits of a tile, which saves a kernel. Below,
# several programs of a tile take turns with its splits, so their number does not depend on lengths of sequences.
BUSY_PROGRAMS = 512
# Maximum size of the partial results of small heads. They grow with rows times splits, so above this size, too, one
# program handles all splits.
MAX_PARTIAL_BYTES = 2**29
# Larger heads need too many registers for one program to accumulate all splits.
MAX_SERIAL_WIDTH = 128


def num_splits(length: int) -> int:
    """Splits of sequences of up to `length` positions, rounded up to a power of two to keep shapes few."""
    return power_of_two(-(-length // SPLIT))


def visible_splits(splits: int, window: int | None) -> int:
    """Maximum splits that a row with this window sees, of `splits` splits of its sequence."""
    return splits if window is None else min(splits, 1 - (1 - window) // SPLIT)


def tile_height(dtype: torch.dtype, groups: int) -> int:
    """Query rows of a tile, counting each head. `groups`: query heads per KV head."""
    # sm_90 tensor cores multiply 64 rows at a time; float32 does not use them and is limited by registers.
    return max(16 if is_wide(dtype) else 64, power_of_two(groups))


def rows_per_tile(dtype: torch.dtype, groups: int) -> int:
    """Maximum rows of a sequence that share a tile."""
    return tile_height(dtype, groups) // groups


def attend_pages(
    query: torch.Tensor,  # [rows, heads, dim]; overwritten by the result
    arena: KVArena,
    layer: int,
    tile_begins: torch.Tensor,  # [tiles] first row
    tile_sizes: torch.Tensor,  # [tiles] number of rows, at consecutive positions of one span; 0: no rows
    positions: torch.Tensor,  # [rows]
    slots: torch.Tensor,  # [rows]; -1: padding
    prefix_lengths: torch.Tensor,  # [rows] positions before the row's branch
    offsets: torch.Tensor,  # [rows] shift of later positions to the right, in logical columns
    scaling: float,
    splits: int,
    kind: AttentionKind = FULL_ATTENTION,
    warps: int | None = None,
) -> torch.Tensor:
    """Attend from every row in a tile to positions up to its own, in place. Return `query`."""
    rows, heads, dim = query.shape
    keys, values, tables = arena.keys[layer], arena.values[layer], arena.tables
    kv_heads, columns, _ = keys.shape
    assert columns * dim <= MAX_ELEMENTS, "the cache has more columns than attention can address"
    groups = heads // kv_heads
    width, height = power_of_two(dim), tile_height(query.dtype, groups)
    shape = {"HEADS": heads, "GROUPS": groups, "DIM": dim, "WIDTH": width, "SPLIT": SPLIT,
             "WINDOW": kind.window or 0, "SINKS": kind.sinks is not None}  # fmt: skip
    options, sinks = launch_options(query.device), query if kind.sinks is None else kind.sinks
    tiles, splits = len(tile_begins), visible_splits(splits, kind.window)
    is_short = splits == 1 or (kind.window is not None and kind.window <= SPLIT)
    serial = width <= MAX_SERIAL_WIDTH and (
        is_short or tiles * kv_heads >= BUSY_PROGRAMS or _partial_bytes(rows, splits, heads, dim) > MAX_PARTIAL_BYTES
    )
    programs = 1 if serial else min(splits, -(-BUSY_PROGRAMS // (tiles * kv_heads)))
    partials = stats = query  # unused by serial programs
    if not serial:
        partials = torch.empty(rows, splits, heads, dim, dtype=torch.float32, device=query.device)
        stats = torch.empty(2, rows, splits, heads, dtype=torch.float32, device=query.device)
    _attend[(tiles, kv_heads, programs)](
        query, keys, values, tables, tile_begins, tile_sizes, positions, slots, prefix_lengths, offsets,
        partials, stats, sinks, scaling, columns, tables.shape[1], splits, rows,
        **shape, SOFTCAP=kind.softcap, HEIGHT=height, BLOCK=_block(query.dtype, width), PAGE=arena.page_size,
        SERIAL=serial, **options, num_warps=warps or _warps(query.dtype, dim, architecture(query.device)),
        num_stages=_stages(query.dtype, width),
    )  # fmt: skip
    if not serial:
        _combine_splits[(rows, heads)](
            partials, stats, sinks, positions, slots, query, splits, **shape, **options, num_warps=1
        )  # fmt: skip
    return query


def captured_length(
    rows: int, tiles: int, length: int, heads: int, kv_heads: int, dim: int, window: int | None = None
) -> int:
    """Maximum positions of sequences in a captured pass: `length`, or fewer if partial results would take too much.

    `window`: the longest of all layers.
    """
    splits, is_busy = num_splits(length), tiles * kv_heads >= BUSY_PROGRAMS
    if is_busy and power_of_two(dim) <= MAX_SERIAL_WIDTH:
        return length
    while splits > 1 and _partial_bytes(rows, visible_splits(splits, window), heads, dim) > MAX_PARTIAL_BYTES:
        splits //= 2
    return min(length, splits * SPLIT)


def scratch_bytes(
    rows: int, length: int, heads: int, kv_heads: int, dim: int, tile_rows: int, window: int | None = None
) -> int:
    """Bytes of the partial results of the largest pass of up to `rows` rows that combines splits.

    `tile_rows`: maximum rows of a tile. `window`: the longest of all layers.
    """
    splits = visible_splits(num_splits(length), window)
    if power_of_two(dim) > MAX_SERIAL_WIDTH:
        return _partial_bytes(rows, splits, heads, dim)
    rows = 0 if splits == 1 else min(rows, tile_rows * BUSY_PROGRAMS // kv_heads)
    return min(MAX_PARTIAL_BYTES, _partial_bytes(rows, splits, heads, dim))


def _partial_bytes(rows: int, splits: int, heads: int, dim: int) -> int:
    return rows * splits * heads * (dim + 2) * torch.float32.itemsize


def _warps(dtype: torch.dtype, dim: int, arch: int) -> int:
    """Warps of a program: as few as its registers allow, so that more programs share an SM.

    On sm_90, they allow 4 for heads of 128, but not for smaller ones padded to 128.
    """
    few = dim <= 64 or (arch == HOPPER and dim == MAX_SERIAL_WIDTH)
    return 4 if few and not is_wide(dtype) else 8


def _block(dtype: torch.dtype, width: int) -> int:
    return min(BLOCK, max(16, 2048 // width)) if is_wide(dtype) else BLOCK


def _stages(dtype: torch.dtype, width: int) -> int:
    return 1 if is_wide(dtype) else 3 if width <= MAX_SERIAL_WIDTH else 2


if triton is not None:
    # Below every score but finite, so masked keys get a weight of exactly zero in any order.
    LOWEST = tl.constexpr(-1e30)

    @triton.jit
    def _first_split(position, WINDOW: tl.constexpr, SPLIT: tl.constexpr):
        """The first split that a row at this position sees. Its partial results begin there."""
        return tl.maximum(position - WINDOW + 1, 0) // SPLIT

    @triton.jit
    def _attend_split(
        q, keys, values, table, prefix, shift, begin, end, visible, scaling,
        DIM: tl.constexpr, WIDTH: tl.constexpr, HEIGHT: tl.constexpr, BLOCK: tl.constexpr, PAGE: tl.constexpr,
        WINDOW: tl.constexpr, SOFTCAP: tl.constexpr,
    ):  # fmt: skip
        """A tile over one split: unnormalized sums of values, maximum scores, and softmax denominators.

        `table`: the sequence's page table. Positions from `prefix` on are shifted right by `shift` logical columns.
        """
        feature, inside = tl.arange(0, WIDTH), tl.arange(0, BLOCK)
        peak = tl.full([HEIGHT], LOWEST, tl.float32)
        denominator = tl.zeros([HEIGHT], tl.float32)
        acc = tl.zeros([HEIGHT, WIDTH], tl.float32)
        branch = tl.where(shift != 0, prefix, end + BLOCK)  # the first position of a branch, or none
        page = tl.load(table + begin // PAGE)
        for start in range(begin, end, BLOCK):
            position = start + inside
            column = page * PAGE + start % PAGE + inside
            if (start % PAGE + BLOCK > PAGE) | (start + BLOCK > branch):
                logical = position + tl.where(position < prefix, 0, shift)
                own = tl.load(table + logical // PAGE, mask=position < end, other=0)
                column = own * PAGE + logical % PAGE
            # Load the entry one block ahead. Then no load of keys waits for a load of the same iteration, and keys are
            # pipelined as deeply as with known addresses.
            page = tl.load(table + tl.minimum(start + BLOCK, end - 1) // PAGE)
            offset = column[:, None] * DIM + feature[None, :]
            mask = (position[:, None] < end) & (feature[None, :] < DIM)
            k = tl.load(keys + offset, mask=mask, other=0.0)
            v = tl.load(values + offset, mask=mask, other=0.0)
            score = tl.dot(q, tl.trans(k), input_precision="ieee") * scaling
            if SOFTCAP is not None:
                score = softcapped(score, SOFTCAP)
            is_visible = position[None, :] <= visible[:, None]
            if WINDOW > 0:
                is_visible &= position[None, :] > visible[:, None] - WINDOW
            score = tl.where(is_visible, score, float("-inf"))
            new_peak = tl.maximum(peak, tl.max(score, 1))
            rescale = tl.exp(peak - new_peak)
            p = tl.exp(score - new_peak[:, None])
            denominator = denominator * rescale + tl.sum(p, 1)
            acc = acc * rescale[:, None] + tl.dot(p.to(v.dtype), v, input_precision="ieee")
            peak = new_peak
        return acc, peak, denominator

    @triton.jit(do_not_specialize=["columns", "pages", "splits", "rows"])
    def _attend(
        query, keys, values, tables, tile_begins, tile_sizes, positions, slots, prefix_lengths, offsets,
        partials, stats, sinks, scaling, columns, pages, splits, rows,
        HEADS: tl.constexpr, GROUPS: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr, SPLIT: tl.constexpr,
        WINDOW: tl.constexpr, SINKS: tl.constexpr, SOFTCAP: tl.constexpr,
        HEIGHT: tl.constexpr, BLOCK: tl.constexpr, PAGE: tl.constexpr, SERIAL: tl.constexpr, OVERLAP: tl.constexpr,
    ):  # fmt: skip
        """The query heads of one KV head and the rows of one tile, over all splits or some of them."""
        if OVERLAP:
            gdc_wait()
        tile, kv_head = tl.program_id(0), tl.program_id(1)
        count = tl.load(tile_sizes + tile).to(tl.int32)
        if count > 0:
            row = tl.load(tile_begins + tile)
            position = tl.load(positions + row).to(tl.int32)
            prefix, shift = tl.load(prefix_lengths + row).to(tl.int32), tl.load(offsets + row).to(tl.int32)
            first = kv_head.to(tl.int64) * columns * DIM
            keys, values, table = keys + first, values + first, tables + tl.load(slots + row) * pages
            line, feature = tl.arange(0, HEIGHT), tl.arange(0, WIDTH)
            own, head = line // GROUPS, kv_head * GROUPS + line % GROUPS
            visible, first_block = position + own, 0
            if WINDOW > 0:
                visible = position + tl.minimum(own, count - 1)  # lines without a row see some position, too
                first_block = tl.maximum(position - WINDOW + 1, 0) // BLOCK * BLOCK
            mask = (own < count)[:, None] & (feature < DIM)[None, :]
            place = ((row + own) * HEADS + head)[:, None] * DIM + feature[None, :]
            q = tl.load(query + place, mask=mask, other=0.0)
            if SERIAL:
                peak = tl.full([HEIGHT], LOWEST, tl.float32)
                denominator = tl.zeros([HEIGHT], tl.float32)
                acc = tl.zeros([HEIGHT, WIDTH], tl.float32)
                for split_begin in range(first_block // SPLIT * SPLIT, position + count, SPLIT):
                    begin, end = split_begin, tl.minimum(split_begin + SPLIT, position + count)
                    if WINDOW > 0:
                        begin = tl.maximum(begin, first_block)
                    split_acc, split_peak, split_denominator = _attend_split(
                        q, keys, values, table, prefix, shift, begin, end, visible, scaling, DIM, WIDTH, HEIGHT, BLOCK,
                        PAGE, WINDOW, SOFTCAP,
                    )  # fmt: skip
                    new_peak = tl.maximum(peak, split_peak)
                    rescale, split_rescale = tl.exp(peak - new_peak), tl.exp(split_peak - new_peak)
                    denominator = denominator * rescale + split_denominator * split_rescale
                    acc = acc * rescale[:, None] + split_acc * split_rescale[:, None]
                    peak = new_peak
                if SINKS:
                    denominator += tl.exp(tl.load(sinks + head) - peak)
                tl.store(query + place, (acc / denominator[:, None]).to(query.dtype.element_ty), mask=mask)
            else:
                end_split = tl.cdiv(position + count, SPLIT)
                for split in range(first_block // SPLIT + tl.program_id(2), end_split, tl.num_programs(2)):
                    begin = split * SPLIT
                    end = tl.minimum(begin + SPLIT, position + count)
                    if WINDOW > 0:
                        begin = tl.maximum(begin, first_block)
                    acc, peak, denominator = _attend_split(
                        q, keys, values, table, prefix, shift, begin, end, visible, scaling, DIM, WIDTH, HEIGHT, BLOCK,
                        PAGE, WINDOW, SOFTCAP,
                    )  # fmt: skip
                    number, is_stored = split, own < count
                    if WINDOW > 0:
                        number = split - _first_split(visible, WINDOW, SPLIT)
                        is_stored &= (number >= 0) & (number < splits)
                    index = ((row + own) * splits + number) * HEADS + head
                    tl.store(partials + index[:, None] * DIM + feature[None, :], acc, mask=mask & is_stored[:, None])
                    tl.store(stats + index, peak, mask=is_stored)
                    denominators = stats + rows.to(tl.int64) * splits * HEADS
                    tl.store(denominators + index, denominator, mask=is_stored)

    @triton.jit(do_not_specialize=["splits"])
    def _combine_splits(
        partials, stats, sinks, positions, slots, attended, splits,
        HEADS: tl.constexpr, GROUPS: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr, SPLIT: tl.constexpr,
        WINDOW: tl.constexpr, SINKS: tl.constexpr, OVERLAP: tl.constexpr,
    ):  # fmt: skip
        """Combine the splits of one query head of one row, in order."""
        if OVERLAP:
            gdc_wait()
        row, head, feature = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.arange(0, WIDTH)
        if tl.load(slots + row) >= 0:
            denominators = stats + tl.num_programs(0).to(tl.int64) * splits * HEADS
            peak = tl.full([1], LOWEST, tl.float32)
            denominator = tl.zeros([1], tl.float32)
            acc = tl.zeros([WIDTH], tl.float32)
            position, first_split = tl.load(positions + row).to(tl.int32), 0
            if WINDOW > 0:
                first_split = _first_split(position, WINDOW, SPLIT)
            for split in range(0, position // SPLIT + 1 - first_split):
                index = (row * splits + split) * HEADS + head
                split_peak = tl.load(stats + index)
                new_peak = tl.maximum(peak, split_peak)
                rescale, split_rescale = tl.exp(peak - new_peak), tl.exp(split_peak - new_peak)
                split_acc = tl.load(partials + index * DIM + feature, mask=feature < DIM, other=0.0)
                denominator = denominator * rescale + tl.load(denominators + index) * split_rescale
                acc = acc * rescale + split_acc * split_rescale
                peak = new_peak
            if SINKS:
                denominator += tl.exp(tl.load(sinks + head) - peak)
            result = (acc / denominator).to(attended.dtype.element_ty)
            tl.store(attended + (row * HEADS + head) * DIM + feature, result, mask=feature < DIM)
