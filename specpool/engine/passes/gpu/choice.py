"""The draft loop's choice of tokens: the most probable token of each row, and its probability, or a sampled token.

The first kernel reduces a part of a row per program, the last one joins a row's parts. Between them, two kernels sample
if any row needs it. The last one also moves the row on to its next position, so that a step takes no further kernels.
"""

import torch

from specpool.engine.cache.checkpoints import Segment
from specpool.engine.numerics.triton_compat import gdc_wait, launch_options, power_of_two, tl, triton
from specpool.engine.passes.packing import INPUT_IDS, NUMBERS_PER_ROW, POSITIONS, SLOTS, TILE_BEGINS, TILE_SIZES
from specpool.engine.sampling.head import Head
from specpool.engine.sampling.kernel import CONTEXT_LENGTH, FIELDS, FINITE_BIT, LARGEST_ID, best_scores
from specpool.engine.sampling.ranking_kernel import PART

if triton is not None:
    from specpool.engine.sampling.ranking_kernel import join_parts, reduce_parts

# Rows of the numbers of a step, see `no_numbers`.
BEGINS, SIZES = NUMBERS_PER_ROW + TILE_BEGINS, NUMBERS_PER_ROW + TILE_SIZES
LOGIT_ROWS, SEGMENTS, REMAINING = SIZES + 1, SIZES + 2, -1


def no_numbers(rows: int, recurs: bool, device: torch.device | str = "cpu") -> torch.Tensor:
    """The numbers of a step without tokens, [numbers, rows].

    They are the arrays of a packed batch in which each row is a tile and has logits, then, if the model `recurs`, the
    segment of each row, [rows, fields of `Segment`], and last the number of tokens that each row still needs.
    """
    size = SEGMENTS + recurs * len(Segment._fields) + 1
    numbers = torch.zeros(size, rows, dtype=torch.int64, device=device)
    numbers[SLOTS] = -1
    return numbers


def choose(
    logits: torch.Tensor,
    head: Head,
    numbers: torch.Tensor | None = None,
    rules: torch.Tensor | None = None,
    chosen: torch.Tensor | None = None,
) -> torch.Tensor:
    """The tokens after logits [n, rows of the head], and their probabilities: [2, n], as float64.

    The token is the smallest of the most probable ones, or a sampled one. The probability of a sampled token is 1, or
    NaN if the largest logit is not finite. `numbers`: the numbers of a step, [numbers, n], which move on to the next
    step. `rules`: the `numbers_of_row` of at least n rows, int32 [rows, FIELDS], which also move on; None: all
    rows are greedy. `chosen`: memory for the result.
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
    reduce_parts[(rows, parts)](
        logits, largest, places, largest, places, sums, outputs, parts,
        EXCLUDES=False, PART=PART, **options, num_warps=4,
    )  # fmt: skip
    best = None if rules is None else best_scores(logits, rules, has_limits=True, output_ids=head.output_ids)
    best_parts = 1 if best is None else best.shape[1]
    _finish_step[(rows,)](
        largest, places, sums, chosen if head.output_ids is None else head.output_ids,
        chosen if numbers is None else numbers, chosen if rules is None else rules, chosen if best is None else best,
        chosen, rows, parts, best_parts,
        WIDTH=power_of_two(parts), BEST_WIDTH=power_of_two(best_parts), MAPPED=head.output_ids is not None,
        NUMBERS=0 if numbers is None else len(numbers), SAMPLES=rules is not None, SEGMENT=len(Segment._fields),
        INPUT_IDS=INPUT_IDS, POSITIONS=POSITIONS, SLOTS=SLOTS, SIZES=SIZES, SEGMENTS=SEGMENTS,
        FIELDS=FIELDS, CONTEXT_LENGTH=CONTEXT_LENGTH, FINITE_BIT=FINITE_BIT, LARGEST_ID=LARGEST_ID,
        **options, num_warps=1,
    )  # fmt: skip
    return chosen


if triton is not None:

    @triton.jit(do_not_specialize=["rows"])
    def _finish_step(
        largest, places, sums, output_ids, numbers, rules, best, chosen, rows, parts, best_parts,
        WIDTH: tl.constexpr, BEST_WIDTH: tl.constexpr, MAPPED: tl.constexpr, NUMBERS: tl.constexpr,
        SAMPLES: tl.constexpr, SEGMENT: tl.constexpr,
        INPUT_IDS: tl.constexpr, POSITIONS: tl.constexpr, SLOTS: tl.constexpr, SIZES: tl.constexpr,
        SEGMENTS: tl.constexpr, FIELDS: tl.constexpr, CONTEXT_LENGTH: tl.constexpr, FINITE_BIT: tl.constexpr,
        LARGEST_ID: tl.constexpr, OVERLAP: tl.constexpr,
    ):  # fmt: skip
        """The choice of a row, and the numbers of its next step."""
        if OVERLAP:
            gdc_wait()
        row = tl.program_id(0)
        _, place, total = join_parts(largest, places, sums, row, parts, WIDTH)
        token = place.to(tl.int64)
        if MAPPED:
            token = tl.load(output_ids + token).to(tl.int64)
        probability = 1 / total
        if SAMPLES:
            rules += row * FIELDS
            sampled = tl.max(tl.load(best + row * best_parts + tl.minimum(tl.arange(0, BEST_WIDTH), best_parts - 1)), 0)
            is_sampled = tl.load(rules).to(tl.float32, bitcast=True) > 0  # the temperature
            token = tl.where(is_sampled, LARGEST_ID - (sampled & LARGEST_ID), token)
            is_finite = (sampled >> FINITE_BIT) & 1
            probability = tl.where(is_sampled, tl.where(is_finite > 0, 1.0, float("nan")), probability)
            tl.store(rules + CONTEXT_LENGTH, tl.load(rules + CONTEXT_LENGTH) + 1)
        tl.store(chosen + row, token.to(tl.float64))
        tl.store(chosen + rows + row, probability.to(tl.float64))
        if NUMBERS > 0:
            remaining = tl.load(numbers + (NUMBERS - 1) * rows + row) - 1
            alive = remaining > 0
            slot = tl.load(numbers + SLOTS * rows + row)
            position = tl.load(numbers + POSITIONS * rows + row)
            tl.store(numbers + (NUMBERS - 1) * rows + row, remaining)
            tl.store(numbers + INPUT_IDS * rows + row, token)
            tl.store(numbers + POSITIONS * rows + row, position + alive.to(tl.int64))
            tl.store(numbers + SLOTS * rows + row, tl.where(alive, slot, -1))
            tl.store(numbers + SIZES * rows + row, alive.to(tl.int64))
            if NUMBERS > SEGMENTS + 1:
                # The next row follows the checkpoint that the step has written, if any. Rows that end replay nothing.
                segment = numbers + SEGMENTS * rows + row * SEGMENT
                write = tl.load(segment + 6)
                read_position = tl.load(segment + tl.where(write >= 0, 7, 4))
                tl.store(segment + 1, alive.to(tl.int64))
                tl.store(segment + 2, tl.where(alive, position + 1, read_position))
                tl.store(segment + 3, tl.where(write >= 0, write, tl.load(segment + 3)))
                tl.store(segment + 4, read_position)
                tl.store(segment + 5, tl.load(segment + 8))
                tl.store(segment + 6, -1)
