"""The draft loop's choice of tokens, in two kernels: the most probable token of each row, and its probability.

The first kernel reduces a part of a row per program, the second joins a row's parts. The second also moves the row on
to its next position, so that a step takes no further kernels.
"""

import torch

from specpool.engine.numerics.triton_compat import gdc_wait, launch_options, power_of_two, tl, triton
from specpool.engine.passes.packing import INPUT_IDS, NUMBERS_PER_ROW, POSITIONS, SLOTS, TILE_BEGINS, TILE_SIZES
from specpool.engine.sampling.head import Head

# Rows of the numbers of a step [REMAINING + 1, rows]: the arrays of a packed batch in which each row is a tile and has
# logits, then the number of tokens that each row still needs.
BEGINS, SIZES = NUMBERS_PER_ROW + TILE_BEGINS, NUMBERS_PER_ROW + TILE_SIZES
LOGIT_ROWS, REMAINING = SIZES + 1, SIZES + 2
# Logits per program of the first kernel.
PART = 4096


def choose(
    logits: torch.Tensor, head: Head, numbers: torch.Tensor | None = None, chosen: torch.Tensor | None = None
) -> torch.Tensor:
    """The most probable tokens after logits [n, rows of the head], and their probabilities: [2, n], as float64.

    The token is the smallest of the most probable ones. `numbers`: the numbers of a step, [REMAINING + 1, n], which
    move on to the next step. `chosen`: receives the result.
    """
    logits = logits.contiguous()
    rows, outputs = logits.shape
    parts = -(-outputs // PART)
    # Separate memory is aligned for any number of rows, so one variant of each kernel is compiled.
    largest = torch.empty(rows, parts, dtype=torch.float32, device=logits.device)
    sums = torch.empty_like(largest)
    places = torch.empty(rows, parts, dtype=torch.int32, device=logits.device)
    if chosen is None:
        chosen = torch.empty(2, rows, dtype=torch.float64, device=logits.device)
    options = launch_options(logits.device)
    _reduce_parts[(rows, parts)](logits, largest, places, sums, outputs, parts, PART=PART, **options, num_warps=4)
    _join_parts[(rows,)](
        largest, places, sums, chosen if head.output_ids is None else head.output_ids,
        chosen if numbers is None else numbers, chosen, rows, parts,
        WIDTH=power_of_two(parts), MAPPED=head.output_ids is not None, ADVANCES=numbers is not None,
        INPUT_IDS=INPUT_IDS, POSITIONS=POSITIONS, SLOTS=SLOTS, SIZES=SIZES, REMAINING=REMAINING,
        **options, num_warps=1,
    )  # fmt: skip
    return chosen


if triton is not None:

    @triton.jit
    def _reduce_parts(logits, largest, places, sums, outputs, parts, PART: tl.constexpr, OVERLAP: tl.constexpr):
        """The largest logit of a part, its first place, and the sum of exponentials relative to it."""
        if OVERLAP:
            gdc_wait()
        row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
        place = part * PART + tl.arange(0, PART)
        x = tl.load(logits + row * outputs + place, mask=place < outputs, other=float("-inf")).to(tl.float32)
        peak = tl.max(x, 0)
        first = tl.min(tl.where(x == peak, place, outputs - 1), 0)  # a valid place even if logits are not numbers
        tl.store(largest + row * parts + part, peak)
        tl.store(places + row * parts + part, first)
        masses = tl.where(x == float("-inf"), 0.0, tl.exp(x - peak))  # -inf - -inf is not a number
        tl.store(sums + row * parts + part, tl.sum(masses, 0))

    @triton.jit(do_not_specialize=["rows"])
    def _join_parts(
        largest, places, sums, output_ids, numbers, chosen, rows, parts,
        WIDTH: tl.constexpr, MAPPED: tl.constexpr, ADVANCES: tl.constexpr,
        INPUT_IDS: tl.constexpr, POSITIONS: tl.constexpr, SLOTS: tl.constexpr, SIZES: tl.constexpr,
        REMAINING: tl.constexpr, OVERLAP: tl.constexpr,
    ):  # fmt: skip
        """The choice of a row, and the numbers of its next step."""
        if OVERLAP:
            gdc_wait()
        row, part = tl.program_id(0), tl.arange(0, WIDTH)
        index, mask = row * parts + part, part < parts
        peaks = tl.load(largest + index, mask=mask, other=float("-inf"))
        peak = tl.max(peaks, 0)
        found = tl.load(places + index, mask=mask, other=0x7FFFFFFF)
        token = tl.min(tl.where(peaks == peak, found, tl.max(tl.where(mask, found, 0), 0)), 0).to(tl.int64)
        total = tl.sum(tl.load(sums + index, mask=mask, other=0.0) * tl.exp(peaks - peak), 0)
        if MAPPED:
            token = tl.load(output_ids + token).to(tl.int64)
        tl.store(chosen + row, token.to(tl.float64))
        tl.store(chosen + rows + row, (1 / total).to(tl.float64))
        if ADVANCES:
            remaining = tl.load(numbers + REMAINING * rows + row) - 1
            alive = remaining > 0
            slot = tl.load(numbers + SLOTS * rows + row)
            position = tl.load(numbers + POSITIONS * rows + row)
            tl.store(numbers + REMAINING * rows + row, remaining)
            tl.store(numbers + INPUT_IDS * rows + row, token)
            tl.store(numbers + POSITIONS * rows + row, position + alive.to(tl.int64))
            tl.store(numbers + SLOTS * rows + row, tl.where(alive, slot, -1))
            tl.store(numbers + SIZES * rows + row, alive.to(tl.int64))
