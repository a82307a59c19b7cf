"""The kernels of gated delta nets, and the short convolution of all recurrent layers. Requires Triton.

`convolve` prepares all rows of a segment, replayed and new ones alike, and `scan` runs them one after the other. The
bits of a row therefore depend on its sequence alone: not on other sequences, chunks of a prompt, or rejected tokens.
Rows of a segment count from its checkpoint on.
"""

from specpool.engine.numerics.triton_compat import gdc_wait, tl, triton
from specpool.engine.passes.gpu.rows import summed

# Added to the squared length of queries and keys.
TINY = tl.constexpr(1e-6)


@triton.jit
def bounds_of(segment):
    """Return the first new row in the pass, the number of rows to replay, and the number of all rows.

    Last, return the number of rows before the state to write: 0 if none is written.
    """
    num_rows, read_position, writes = tl.load(segment + 1), tl.load(segment + 4), tl.load(segment + 6) >= 0
    num_replayed = (tl.load(segment + 2) - read_position).to(tl.int32)
    num_before = tl.where(writes, tl.load(segment + 7) - read_position, 0).to(tl.int32)
    return tl.load(segment), num_replayed, num_replayed + num_rows.to(tl.int32), num_before


@triton.jit
def convolved(
    partials, bias, edges, inputs, taps, segment, at, first_row, num_replayed, end, num_before, feature, mask, rows,
    FEATURES: tl.constexpr, GATED: tl.constexpr, SIZE: tl.constexpr, SPLITS: tl.constexpr, BIASED: tl.constexpr,
    TAIL_ROWS: tl.constexpr, TAPS: tl.constexpr,
):  # fmt: skip
    """Return the short convolution of some features [1, width] of the rows `at` [tile, 1] of a segment.

    Store the inputs of new rows in a tail, and the last inputs before the state to write as its edges. Inputs come
    first in `partials`, or last, after gates of inputs and gates of results, if they are `GATED`.
    """
    read, read_tail = tl.load(segment + 3), tl.load(segment + 5)
    write, write_tail = tl.load(segment + 6), tl.load(segment + 8)
    x = tl.zeros([at.shape[0], feature.shape[1]], tl.float32)
    for tap in tl.static_range(TAPS):
        source = at - (TAPS - 1) + tap
        row = first_row + source - num_replayed
        is_edge, is_replayed = (source < 0) & (read >= 0), (source >= 0) & (source < num_replayed)
        edge = edges + (read * (TAPS - 1) + source + TAPS - 1) * FEATURES + feature
        tail = inputs + (read_tail * TAIL_ROWS + source) * FEATURES + feature
        own = mask & (source >= num_replayed) & (source < end)
        if GATED:
            new = summed(partials, bias, row, 2 * FEATURES + feature, own, rows, SIZE, SPLITS, BIASED)
            new *= summed(partials, bias, row, feature, own, rows, SIZE, SPLITS, BIASED)
        else:
            new = summed(partials, bias, row, feature, own, rows, SIZE, SPLITS, BIASED)
        value = tl.where(own, new.to(inputs.dtype.element_ty), tl.load(tail, mask=is_replayed & mask, other=0.0))
        value = tl.where(source < 0, tl.load(edge, mask=is_edge & mask, other=0.0), value)
        factor = tl.load(taps + tap * FEATURES + feature, mask=mask, other=0.0)
        x += value.to(tl.float32) * factor.to(tl.float32)
        if tap == TAPS - 1:
            is_kept = (at >= num_replayed) & (at < end) & (at >= num_before)
            kept = inputs + (write_tail * TAIL_ROWS + at - num_before) * FEATURES + feature
            tl.store(kept, value, mask=is_kept & mask)
        if tap > 0:
            edge = edges + (write * (TAPS - 1) + tap - 1) * FEATURES + feature + 0 * at
            tl.store(edge, value, mask=(at == num_before - 1) & mask)
    return x


@triton.jit
def _work_row(at, segment, first_row, num_replayed, rows, TAIL_ROWS: tl.constexpr):
    """Return where prepared rows lie: new rows as in the pass, then places for the replayed rows of each segment."""
    return tl.where(at >= num_replayed, first_row + at - num_replayed, rows + segment * TAIL_ROWS + at)


@triton.jit
def _softplus(x):
    """Return log(1 + e^x), also where 1 + e^x rounds to 1."""
    y = tl.exp(-tl.abs(x))
    total = 1 + y
    added = total - 1  # what is left of y, by which the logarithm is off
    log = tl.where(added > 0, tl.log(total) * (y / tl.where(added > 0, added, 1.0)), y)
    return tl.maximum(x, 0.0) + log


@triton.jit
def _prepare_gates(
    partials, gates, rates, biases, factors, at, row, work_row, replayed_row, kept_row, is_new, is_kept, end, rows,
    SIZE: tl.constexpr, SPLITS: tl.constexpr, FIRST: tl.constexpr, HEADS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Prepare the decay and beta of all value heads."""
    head = tl.arange(0, WIDTH)[None, :]
    is_head = head < HEADS
    is_read = (at < end) & is_head & (is_new == 0)
    a = summed(partials, None, row, FIRST + HEADS + head, is_new & is_head, rows, SIZE, SPLITS, False)
    a += tl.load(biases + head, mask=is_head, other=0.0).to(tl.float32)
    b = summed(partials, None, row, FIRST + head, is_new & is_head, rows, SIZE, SPLITS, False)
    log_decay = tl.load(rates + head, mask=is_head, other=0.0).to(tl.float32) * _softplus(a)
    beta = 1 / (1 + tl.exp(-b))
    replayed = gates + replayed_row * 2 * HEADS + head
    log_decay = tl.where(is_new, log_decay, tl.load(replayed, mask=is_read, other=0.0))
    beta = tl.where(is_new, beta, tl.load(replayed + HEADS, mask=is_read, other=0.0))
    kept, factor = gates + kept_row * 2 * HEADS + head, factors + work_row * 2 * HEADS + head
    tl.store(kept, log_decay, mask=is_kept & is_head)
    tl.store(kept + HEADS, beta, mask=is_kept & is_head)
    tl.store(factor, tl.exp(log_decay), mask=(at < end) & is_head)
    tl.store(factor + HEADS, beta, mask=(at < end) & is_head)


@triton.jit(do_not_specialize=["rows"])
def convolve(
    partials, segments, edges, inputs, gates, taps, rates, biases, prepared, factors, rows,
    SIZE: tl.constexpr, SPLITS: tl.constexpr, FIELDS: tl.constexpr, TAIL_ROWS: tl.constexpr, TILE: tl.constexpr,
    KEY_HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr, HEADS_WIDTH: tl.constexpr,
    KEY: tl.constexpr, VALUE: tl.constexpr, WIDTH: tl.constexpr, TAPS: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Prepare one head of queries, keys or values, or the gates of all heads, for some rows of a segment.

    Store the inputs and gates of new rows in a tail, and the last inputs before the state to write as its edges.
    """
    FEATURES: tl.constexpr = 2 * KEY_HEADS * KEY + VALUE_HEADS * VALUE
    if OVERLAP:
        gdc_wait()
    index, head = tl.program_id(0), tl.program_id(1)
    segment = segments + index * FIELDS
    first_row, num_replayed, end, num_before = bounds_of(segment)
    for begin in range(tl.program_id(2) * TILE, end, tl.num_programs(2) * TILE):
        at = (begin + tl.arange(0, TILE))[:, None]
        work_row = _work_row(at, index, first_row, num_replayed, rows, TAIL_ROWS)
        if head == 2 * KEY_HEADS + VALUE_HEADS:
            is_new, row = (at >= num_replayed) & (at < end), first_row + at - num_replayed
            replayed_row = tl.load(segment + 5) * TAIL_ROWS + at
            kept_row = tl.load(segment + 8) * TAIL_ROWS + at - num_before
            _prepare_gates(
                partials, gates, rates, biases, factors, at, row, work_row, replayed_row, kept_row,
                is_new, is_new & (at >= num_before), end, rows,
                SIZE, SPLITS, FEATURES + VALUE_HEADS * VALUE, VALUE_HEADS, HEADS_WIDTH,
            )  # fmt: skip
        else:
            is_value, inside = head >= 2 * KEY_HEADS, tl.arange(0, WIDTH)[None, :]
            first = tl.where(is_value, 2 * KEY_HEADS * KEY + (head - 2 * KEY_HEADS) * VALUE, head * KEY)
            feature, mask = first + inside, inside < tl.where(is_value, VALUE, KEY)
            x = convolved(
                partials, None, edges, inputs, taps, segment, at, first_row, num_replayed, end, num_before, feature,
                mask, rows, FEATURES, False, SIZE, SPLITS, False, TAIL_ROWS, TAPS,
            )  # fmt: skip
            x = x / (1 + tl.exp(-x))
            scale = tl.rsqrt(tl.sum(x * x, 1) + TINY)[:, None] * tl.where(head < KEY_HEADS, KEY**-0.5, 1.0)
            tl.store(prepared + work_row * FEATURES + feature, tl.where(is_value, x, x * scale), mask=(at < end) & mask)


@triton.jit(do_not_specialize=["rows"])
def scan(
    prepared, factors, segments, states, results, rows,
    FIELDS: tl.constexpr, TAIL_ROWS: tl.constexpr, KEY_HEADS: tl.constexpr, VALUE_HEADS: tl.constexpr,
    KEY: tl.constexpr, KEY_WIDTH: tl.constexpr, VALUE: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Run the rows of a segment through some columns of a value head's state, and store the state to write."""
    FEATURES: tl.constexpr = 2 * KEY_HEADS * KEY + VALUE_HEADS * VALUE
    if OVERLAP:
        gdc_wait()
    index, head = tl.program_id(0), tl.program_id(1)
    first_row, num_replayed, end, num_before = bounds_of(segments + index * FIELDS)
    if end > num_replayed:
        key, column = tl.arange(0, KEY_WIDTH), tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
        is_key, is_value = key < KEY, column < VALUE
        of_query = prepared + head // (VALUE_HEADS // KEY_HEADS) * KEY + key
        of_key, of_value = of_query + KEY_HEADS * KEY, prepared + 2 * KEY_HEADS * KEY + head * VALUE + column
        read, write = tl.load(segments + index * FIELDS + 3), tl.load(segments + index * FIELDS + 6)
        place, in_state = key[:, None] * VALUE + column[None, :], is_key[:, None] & is_value[None, :]
        own = states + (read * VALUE_HEADS + head) * KEY * VALUE + place
        state = tl.load(own, mask=in_state & (read >= 0), other=0.0)
        row = _work_row(0, index, first_row, num_replayed, rows, TAIL_ROWS).to(tl.int64)
        q = tl.load(of_query + row * FEATURES, mask=is_key, other=0.0)
        k = tl.load(of_key + row * FEATURES, mask=is_key, other=0.0)
        v = tl.load(of_value + row * FEATURES, mask=is_value, other=0.0)
        decay, beta = (
            tl.load(factors + row * 2 * VALUE_HEADS + head),
            tl.load(factors + (row * 2 + 1) * VALUE_HEADS + head),
        )
        for at in range(0, end):
            # Load a row ahead, so that no row waits for its inputs.
            next_row = _work_row(tl.minimum(at + 1, end - 1), index, first_row, num_replayed, rows, TAIL_ROWS)
            next_q = tl.load(of_query + next_row * FEATURES, mask=is_key, other=0.0)
            next_k = tl.load(of_key + next_row * FEATURES, mask=is_key, other=0.0)
            next_v = tl.load(of_value + next_row * FEATURES, mask=is_value, other=0.0)
            next_decay = tl.load(factors + next_row * 2 * VALUE_HEADS + head)
            next_beta = tl.load(factors + (next_row * 2 + 1) * VALUE_HEADS + head)
            state *= decay
            delta = (v - tl.sum(state * k[:, None], 0)) * beta
            state += k[:, None] * delta[None, :]
            result = tl.sum(state * q[:, None], 0)
            place_of_row = results + ((first_row + at - num_replayed) * VALUE_HEADS + head) * VALUE + column
            tl.store(place_of_row, result, mask=is_value & (at >= num_replayed))
            if at == num_before - 1:
                tl.store(states + (write * VALUE_HEADS + head) * KEY * VALUE + place, state, mask=in_state)
            q, k, v, decay, beta = next_q, next_k, next_v, next_decay, next_beta
