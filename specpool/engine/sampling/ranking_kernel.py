"""Ranks the largest logits of rows on a GPU: each round of two kernels finds the next one of every row.

The first kernel reduces a part of a row per program, the second joins a row's parts.
"""

import torch

from specpool.engine.numerics.triton_compat import gdc_wait, launch_options, power_of_two, tl, triton
from specpool.engine.sampling.head import Head

# Logits per program of the first kernel.
PART = 4096


def rank_greedy(logits: torch.Tensor, head: Head, count: int) -> torch.Tensor:
    """Rank the `count` largest of logits [n, rows of the head]. Return tokens and log-probabilities [n, count, 2].

    The result is on the device, as float64. The first output wins ties. Log-probabilities of impossible tokens, and of
    rows whose largest logit is not finite, are not finite.
    """
    logits = logits.contiguous()
    rows, outputs = logits.shape
    parts, device, options = -(-outputs // PART), logits.device, launch_options(logits.device)
    # Separate memory is aligned for any number of rows, so one variant of each kernel is compiled.
    largest = torch.empty(rows, parts, dtype=torch.float32, device=device)
    sums = torch.empty_like(largest)
    places = torch.empty(rows, parts, dtype=torch.int32, device=device)
    peaks, totals, last_logits = (torch.empty(rows, dtype=torch.float32, device=device) for _ in range(3))
    last_places = torch.empty(rows, dtype=torch.int32, device=device)
    ranked = torch.empty(rows, count, 2, dtype=torch.float64, device=device)
    for rank in range(count):
        reduce_parts[(rows, parts)](
            logits, last_logits, last_places, largest, places, sums, outputs, parts,
            EXCLUDES=rank > 0, PART=PART, **options, num_warps=4,
        )  # fmt: skip
        _rank_next[(rows,)](
            largest, places, sums, ranked if head.output_ids is None else head.output_ids, peaks, totals, last_logits,
            last_places, ranked, parts, rank, count,
            FIRST=rank == 0, WIDTH=power_of_two(parts), MAPPED=head.output_ids is not None, **options, num_warps=1,
        )  # fmt: skip
    return ranked


if triton is not None:

    @triton.jit
    def reduce_parts(
        logits, last_logits, last_places, largest, places, sums, outputs, parts,
        EXCLUDES: tl.constexpr, PART: tl.constexpr, OVERLAP: tl.constexpr,
    ):  # fmt: skip
        """Store the largest logit of a part, its first place, and the sum of exponentials relative to it.

        EXCLUDES: ignore the row's last ranked logit, and those that rank before it.
        """
        if OVERLAP:
            gdc_wait()
        row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
        place = part * PART + tl.arange(0, PART)
        x = tl.load(logits + row * outputs + place, mask=place < outputs, other=float("-inf")).to(tl.float32)
        if EXCLUDES:
            last = tl.load(last_logits + row)
            follows = (x < last) | ((x == last) & (place > tl.load(last_places + row)))
            x = tl.where(follows, x, float("-inf"))
        peak = tl.max(x, 0)
        first = tl.min(tl.where(x == peak, place, outputs - 1), 0)  # a valid place even if logits are not numbers
        tl.store(largest + row * parts + part, peak)
        tl.store(places + row * parts + part, first)
        masses = tl.where(x == float("-inf"), 0.0, tl.exp(x - peak))  # -inf - -inf is not a number
        tl.store(sums + row * parts + part, tl.sum(masses, 0))

    @triton.jit
    def join_parts(largest, places, sums, row, parts, WIDTH: tl.constexpr):
        """Return the largest logit of a row, its first place, and the sum of exponentials relative to it."""
        part = tl.arange(0, WIDTH)
        index, mask = row * parts + part, part < parts
        peaks = tl.load(largest + index, mask=mask, other=float("-inf"))
        peak = tl.max(peaks, 0)
        found = tl.load(places + index, mask=mask, other=0x7FFFFFFF)
        place = tl.min(tl.where(peaks == peak, found, tl.max(tl.where(mask, found, 0), 0)), 0)
        total = tl.sum(tl.load(sums + index, mask=mask, other=0.0) * tl.exp(peaks - peak), 0)
        return peak, place, total

    @triton.jit(do_not_specialize=["rank", "count"])
    def _rank_next(
        largest, places, sums, output_ids, peaks, totals, last_logits, last_places, ranked, parts, rank, count,
        FIRST: tl.constexpr, WIDTH: tl.constexpr, MAPPED: tl.constexpr, OVERLAP: tl.constexpr,
    ):  # fmt: skip
        """Store the token of a rank and its log-probability."""
        if OVERLAP:
            gdc_wait()
        row = tl.program_id(0)
        logit, place, total = join_parts(largest, places, sums, row, parts, WIDTH)
        peak = logit
        if FIRST:
            tl.store(peaks + row, peak)
            tl.store(totals + row, total)
        else:
            peak, total = tl.load(peaks + row), tl.load(totals + row)
        tl.store(last_logits + row, logit)
        tl.store(last_places + row, place)
        token = place.to(tl.int64)
        if MAPPED:
            token = tl.load(output_ids + token).to(tl.int64)
        ranked += (row * count + rank) * 2
        tl.store(ranked, token.to(tl.float64))
        tl.store(ranked + 1, (logit - peak - tl.log(total)).to(tl.float64))
