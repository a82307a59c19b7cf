"""The kernels of attention over pages. Requires Triton."""

from specpool.engine.numerics.triton_compat import gdc_wait, tl, triton
from specpool.engine.passes.gpu.functions import softcapped

# Below every score, but finite, so masked keys get a weight of exactly zero in any order.
LOWEST = tl.constexpr(-1e30)


@triton.jit
def _place_of(split, splits, WINDOW: tl.constexpr):
    """Return the place of a split's partial results. With a window, the places of unseen splits are reused."""
    place = split
    if WINDOW > 0:
        place = split % splits
    return place


@triton.jit
def _attend_split(
    q, q_rotary, keys, values, table, prefix, shift, begin, end, visible, scaling,
    DIM: tl.constexpr, WIDTH: tl.constexpr, HEIGHT: tl.constexpr, BLOCK: tl.constexpr, PAGE: tl.constexpr,
    WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, ROTARY: tl.constexpr, ROTARY_WIDTH: tl.constexpr,
):  # fmt: skip
    """Return a tile's unnormalized sums of values, maximum scores, and softmax denominators over one split.

    `table`: the sequence's page table. Positions from `prefix` on are shifted right by `shift` logical columns.
    `ROTARY`: features of a key that follow its value; 0: keys and values are separate.
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
        # Load the entry one block ahead, so no load of keys waits for a load of the same iteration. Keys are then
        # pipelined as deeply as with known addresses.
        page = tl.load(table + tl.minimum(start + BLOCK, end - 1) // PAGE)
        offset = column[:, None] * (DIM + ROTARY) + feature[None, :]
        mask = (position[:, None] < end) & (feature[None, :] < DIM)
        k = tl.load(keys + offset, mask=mask, other=0.0)
        if ROTARY > 0:
            v, rotary = k, tl.arange(0, ROTARY_WIDTH)
            place = keys + column[:, None] * (DIM + ROTARY) + DIM + rotary[None, :]
            k_rotary = tl.load(place, mask=(position[:, None] < end) & (rotary[None, :] < ROTARY), other=0.0)
            score = tl.dot(q_rotary, tl.trans(k_rotary), input_precision="ieee")
            score = tl.dot(q, tl.trans(k), score, input_precision="ieee") * scaling
        else:
            v = tl.load(values + offset, mask=mask, other=0.0)
            score = tl.dot(q, tl.trans(k), input_precision="ieee") * scaling
        if SOFTCAP is not None:
            score = softcapped(score, SOFTCAP)
        if WINDOW > 0:
            distance = visible[:, None] - position[None, :]
            is_visible = distance.to(tl.uint32, bitcast=True) < WINDOW
        else:
            is_visible = position[None, :] <= visible[:, None]
        score = tl.where(is_visible, score, float("-inf"))
        new_peak = tl.maximum(peak, tl.max(score, 1))
        rescale = tl.exp(peak - new_peak)
        p = tl.exp(score - new_peak[:, None])
        denominator = denominator * rescale + tl.sum(p, 1)
        acc = acc * rescale[:, None] + tl.dot(p.to(v.dtype), v, input_precision="ieee")
        peak = new_peak
    return acc, peak, denominator


@triton.jit(do_not_specialize=["columns", "pages", "splits", "rows"])
def attend(
    query, keys, values, tables, tile_begins, tile_sizes, positions, slots, prefix_lengths, offsets,
    attended, partials, stats, sinks, scaling, columns, pages, splits, rows,
    HEADS: tl.constexpr, GROUPS: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr, SPLIT: tl.constexpr,
    WINDOW: tl.constexpr, SINKS: tl.constexpr, SOFTCAP: tl.constexpr,
    ROTARY: tl.constexpr, ROTARY_WIDTH: tl.constexpr,
    HEIGHT: tl.constexpr, BLOCK: tl.constexpr, PAGE: tl.constexpr, SERIAL: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Attend with the query heads of one KV head and the rows of one tile, over all or some splits.

    With latent attention (`ROTARY` > 0), attend with a block of the query heads.
    """
    if OVERLAP:
        gdc_wait()
    tile, kv_head = tl.program_id(0), tl.program_id(1)
    count = tl.load(tile_sizes + tile).to(tl.int32)
    if count > 0:
        row = tl.load(tile_begins + tile)
        position = tl.load(positions + row).to(tl.int32)
        prefix, shift = tl.load(prefix_lengths + row).to(tl.int32), tl.load(offsets + row).to(tl.int32)
        table = tables + tl.load(slots + row) * pages
        if ROTARY == 0:
            first = kv_head.to(tl.int64) * columns * DIM
            keys, values = keys + first, values + first
        line, feature = tl.arange(0, HEIGHT), tl.arange(0, WIDTH)
        own, head = line // GROUPS, kv_head * GROUPS + line % GROUPS
        visible, first_block = position + own, 0
        if WINDOW > 0:
            visible = position + tl.minimum(own, count - 1)  # lines without a row must see a position, too
            first_block = tl.maximum(position - WINDOW + 1, 0) // BLOCK * BLOCK
        is_own = own < count
        if HEADS % GROUPS != 0:
            is_own &= head < HEADS
        mask = is_own[:, None] & (feature < DIM)[None, :]
        of_row = ((row + own) * HEADS + head)[:, None]
        place = of_row * DIM + feature[None, :]
        q = tl.load(query + of_row * (DIM + ROTARY) + feature[None, :], mask=mask, other=0.0)
        q_rotary = q
        if ROTARY > 0:
            rotary = tl.arange(0, ROTARY_WIDTH)
            source = query + of_row * (DIM + ROTARY) + DIM + rotary[None, :]
            q_rotary = tl.load(source, mask=is_own[:, None] & (rotary < ROTARY)[None, :], other=0.0)
        if SERIAL:
            peak = tl.full([HEIGHT], LOWEST, tl.float32)
            denominator = tl.zeros([HEIGHT], tl.float32)
            acc = tl.zeros([HEIGHT, WIDTH], tl.float32)
            for split_begin in range(first_block // SPLIT * SPLIT, position + count, SPLIT):
                begin, end = split_begin, tl.minimum(split_begin + SPLIT, position + count)
                if WINDOW > 0:
                    begin = tl.maximum(begin, first_block)
                split_acc, split_peak, split_denominator = _attend_split(
                    q, q_rotary, keys, values, table, prefix, shift, begin, end, visible, scaling, DIM, WIDTH, HEIGHT,
                    BLOCK, PAGE, WINDOW, SOFTCAP, ROTARY, ROTARY_WIDTH,
                )  # fmt: skip
                new_peak = tl.maximum(peak, split_peak)
                rescale, split_rescale = tl.exp(peak - new_peak), tl.exp(split_peak - new_peak)
                denominator = denominator * rescale + split_denominator * split_rescale
                acc = acc * rescale[:, None] + split_acc * split_rescale[:, None]
                peak = new_peak
            if SINKS:
                denominator += tl.exp(tl.load(sinks + head) - peak)
            tl.store(attended + place, (acc / denominator[:, None]).to(attended.dtype.element_ty), mask=mask)
        else:
            end_split = tl.cdiv(position + count, SPLIT)
            for split in range(first_block // SPLIT + tl.program_id(2), end_split, tl.num_programs(2)):
                begin = split * SPLIT
                end = tl.minimum(begin + SPLIT, position + count)
                if WINDOW > 0:
                    begin = tl.maximum(begin, first_block)
                acc, peak, denominator = _attend_split(
                    q, q_rotary, keys, values, table, prefix, shift, begin, end, visible, scaling, DIM, WIDTH, HEIGHT,
                    BLOCK, PAGE, WINDOW, SOFTCAP, ROTARY, ROTARY_WIDTH,
                )  # fmt: skip
                index = ((row + own) * splits + _place_of(split, splits, WINDOW)) * HEADS + head
                tl.store(partials + index[:, None] * DIM + feature[None, :], acc, mask=mask)
                tl.store(stats + index, peak, mask=is_own)
                denominators = stats + rows.to(tl.int64) * splits * HEADS
                tl.store(denominators + index, denominator, mask=is_own)


@triton.jit(do_not_specialize=["splits"])
def combine_splits(
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
            first_split = tl.maximum(position - WINDOW + 1, 0) // SPLIT
        for split in range(first_split, position // SPLIT + 1):
            index = (row * splits + _place_of(split, splits, WINDOW)) * HEADS + head
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
