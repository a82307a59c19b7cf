"""Batch sampling on a GPU with two Triton kernels, with the same choices as `specpool.engine.sampling.sampler`.

The first finds the smallest logit that min_p, top_k and top_p keep, with one program per row. The second adds
noise and finds the largest sum, with as many programs per row as the vocabulary needs. Both are batch-invariant and
match the CPU bit for bit: they use unfused float32 operations and add up probability masses as integers.
"""

import math
from collections.abc import Sequence

import numpy as np
import torch

from specpool.engine.numerics.triton_compat import gdc_wait, launch_options, tl, triton
from specpool.engine.numerics.uploads import upload
from specpool.protocol.sampling import SamplingParams

if triton is not None:
    from specpool.engine.numerics.triton_elementary import float_of_order, gumbel, masses, noise_keys, order_of_float

# Logits that the search for limits reads at a time, and the size of its scratch memory.
SEARCH_BLOCK = 4096
# Logits per program that adds noise, and how many it reads at a time.
PART, BLOCK = 8192, 1024
SEARCH_WARPS, SCORE_WARPS = 8, 4
# 32-bit numbers per row: temperature, top_p, log(min_p), top_k, both halves of the seed, and the context length.
FIELDS = 7
CONTEXT_LENGTH = 6
LARGEST_ID, FINITE_BIT = (1 << 31) - 1, 31
_MASK32 = (1 << 32) - 1


def has_kernels(device: torch.device) -> bool:
    return device.type == "cuda" and triton is not None


def sample_rows(
    logits: torch.Tensor, rules: Sequence[tuple[SamplingParams | None, int]], changed: torch.Tensor | None = None
) -> tuple[list[int], list[bool]]:
    """Choose a token for each row of logits [n, vocab_size]. Return the tokens, and whether each row is finite.

    A row is finite if its largest logit is finite; NaN counts as the largest. `rules`: parameters (None: greedy) and
    context length of each row. `changed`: logits [n, vocab_size] after bias, masks and penalties, to choose from.
    """
    if not rules:
        return [], []
    of_rows = [numbers_of_row(params, length, logits.shape[1]) for params, length in rules]
    numbers = upload(torch.tensor(of_rows, dtype=torch.int32), logits.device)
    has_limits = any(params is not None and _has_limits(params) for params, _ in rules)
    chosen: list[int] = best_scores(logits, numbers, has_limits, changed=changed).amax(1).tolist()
    return [LARGEST_ID - (each & LARGEST_ID) for each in chosen], [bool(each >> FINITE_BIT & 1) for each in chosen]


def best_scores(
    logits: torch.Tensor,
    numbers: torch.Tensor,
    has_limits: bool,
    output_ids: torch.Tensor | None = None,
    changed: torch.Tensor | None = None,
) -> torch.Tensor:
    """The best token of each part of rows of logits [n, outputs], as int64 [n, parts]. The largest one is the choice.

    The low 31 bits hold `LARGEST_ID` minus the token. `FINITE_BIT` tells whether its original logit is finite.
    `numbers`: see `numbers_of_row`, int32 [n, FIELDS] on the device. `has_limits`: whether any row may have a min_p,
    top_k or top_p. `output_ids`: the token of each output. `changed`: see `sample_rows`.
    """
    original = logits.contiguous()
    logits = original if changed is None else changed.contiguous()
    rows, outputs = logits.shape
    parts = triton.cdiv(outputs, PART)
    options = launch_options(logits.device)
    if has_limits:
        min_logits = torch.empty(rows, dtype=torch.float32, device=logits.device)
        scratch = torch.empty(rows, SEARCH_BLOCK, dtype=logits.dtype, device=logits.device)
        _find_min_logits[(rows,)](
            logits, numbers, scratch, min_logits, outputs,
            FIELDS=FIELDS, WIDTH=SEARCH_BLOCK, **options, num_warps=SEARCH_WARPS,
        )  # fmt: skip
    else:
        min_logits = torch.full((rows,), -torch.inf, device=logits.device)
    best = torch.empty(rows, parts, dtype=torch.int64, device=logits.device)
    _score[(rows, parts)](
        logits, original, numbers, min_logits, best if output_ids is None else output_ids, best, outputs, parts,
        MAPPED=output_ids is not None, CHANGED=changed is not None, FIELDS=FIELDS, CONTEXT_LENGTH=CONTEXT_LENGTH,
        PART=PART, BLOCK=BLOCK, **options, num_warps=SCORE_WARPS,
    )  # fmt: skip
    return best


def _has_limits(params: SamplingParams) -> bool:
    return params.temperature > 0 and (params.top_k > 0 or params.top_p < 1 or params.min_p > 0)


def numbers_of_row(params: SamplingParams | None, length: int, outputs: int) -> tuple[int, ...]:
    """The parameters (None: greedy) and context length of a row of `outputs` logits, as 32-bit numbers."""
    if params is None or params.temperature == 0:
        return (0,) * FIELDS
    top_k = params.top_k if 0 < params.top_k < outputs else 0
    log_min_p = math.log(params.min_p) if params.min_p > 0 else -math.inf
    floats = np.array([params.temperature, params.top_p, log_min_p], np.float32)
    seed = np.array([params.seed & _MASK32, params.seed >> 32 & _MASK32, length], np.uint32)
    return (*floats.view(np.int32).tolist(), top_k, *seed.view(np.int32).tolist())


if triton is not None:

    @triton.jit
    def _find_min_logits(
        logits, numbers, scratch, min_logits, vocab,
        FIELDS: tl.constexpr, WIDTH: tl.constexpr, OVERLAP: tl.constexpr,
    ):  # fmt: skip
        """Store the smallest logit, divided by the temperature, that a row's limits keep. `scratch`: [n, WIDTH]."""
        if OVERLAP:
            gdc_wait()
        row = tl.program_id(0).to(tl.int64)
        numbers += row * FIELDS
        temperature, top_p, log_min_p = _float(numbers), _float(numbers + 1), _float(numbers + 2)
        top_k = tl.load(numbers + 3)
        limited = (log_min_p > float("-inf")) | (top_k > 0) | (top_p < 1)
        limit = tl.full([], float("-inf"), tl.float32)
        if (temperature > 0) & limited:
            logits += row * vocab
            scratch += row * WIDTH
            largest = tl.full([WIDTH], float("-inf"), tl.float32)
            for at in range(0, vocab, WIDTH):
                largest = tl.maximum(largest, _load(logits, at, vocab, WIDTH))
            best = tl.div_rn(tl.max(largest, 0), temperature)
            if (best > float("-inf")) & (best < float("inf")):
                limit = best + log_min_p
                if (top_k > 0) | (top_p < 1):
                    tl.store(scratch + tl.arange(0, WIDTH), largest)
                    tl.debug_barrier()
                    limit = _search(logits, scratch, vocab, temperature, top_k, top_p, best, limit, WIDTH)
        tl.store(min_logits + row, limit)

    @triton.jit
    def _search(logits, scratch, vocab, temperature, top_k, top_p, best, limit, WIDTH: tl.constexpr):
        """Return the largest of `limit` and the limits of top_k and top_p.

        `scratch` holds first the largest logit of each lane, and then the logits >= `begin`. If these fit, the search
        reads nothing else.
        """
        rank = tl.where(top_k > 0, top_k, WIDTH // 2)
        begin = limit
        if rank <= WIDTH:  # at least `rank` lanes reach this logit, so at least `rank` logits are kept
            begin = _kth_largest(scratch, WIDTH, temperature, rank, limit, best, WIDTH)
            tl.debug_barrier()
        count = _keep(logits, scratch, vocab, temperature, begin, WIDTH)
        tl.debug_barrier()
        source, length = logits, vocab
        if count <= WIDTH:
            source, length = scratch, count
        if top_k > 0:
            limit = _kth_largest(source, length, temperature, top_k, begin, best, WIDTH)
        if top_p < 1:
            begin = tl.maximum(begin, limit)
            if top_k > 0:  # top_k removed everything below `begin`
                total = _mass(source, length, temperature, begin, best, WIDTH)
            else:
                total = _mass(logits, vocab, temperature, limit, best, WIDTH)
            goal = total.to(tl.float64) * top_p.to(tl.float64)
            if _mass(source, length, temperature, begin, best, WIDTH).to(tl.float64) < goal:
                source, length, begin = logits, vocab, limit
            limit = _nucleus(source, length, temperature, goal, begin, best, WIDTH)
        return limit

    @triton.jit
    def _keep(logits, scratch, vocab, temperature, begin, WIDTH: tl.constexpr):
        """Copy the logits >= `begin` while there is room; returns their number."""
        count = tl.zeros([], tl.int32)
        for at in range(0, vocab, WIDTH):
            x = _load(logits, at, vocab, WIDTH)
            kept = (tl.div_rn(x, temperature) >= begin) & (at + tl.arange(0, WIDTH) < vocab)
            place = count + tl.cumsum(kept.to(tl.int32), 0) - 1
            tl.store(scratch + place, x, mask=kept & (place < WIDTH))
            count += tl.sum(kept.to(tl.int32), 0)
        return count

    @triton.jit
    def _kth_largest(logits, length, temperature, rank, low, high, WIDTH: tl.constexpr):
        """Find the `rank`-th largest logit by bisection from `low` to `high`. Returns `low` if fewer are larger."""
        low, high = order_of_float(low).to(tl.int64), order_of_float(high).to(tl.int64)
        while low < high:
            middle = (low + high + 1) >> 1
            threshold = float_of_order(middle)
            counts = tl.zeros([WIDTH], tl.int32)
            for at in range(0, length, WIDTH):
                counts += (tl.div_rn(_load(logits, at, length, WIDTH), temperature) >= threshold).to(tl.int32)
            if tl.sum(counts, 0) >= rank:
                low = middle
            else:
                high = middle - 1
        return float_of_order(low)

    @triton.jit
    def _nucleus(logits, length, temperature, goal, low, high, WIDTH: tl.constexpr):
        """Find the smallest logit >= `low` above which the mass is below `goal`; `high`: the largest logit."""
        best = high
        low, high = order_of_float(low).to(tl.int64), order_of_float(high).to(tl.int64)
        while low < high:
            middle = (low + high) >> 1
            if _mass(logits, length, temperature, float_of_order(middle + 1), best, WIDTH).to(tl.float64) < goal:
                high = middle
            else:
                low = middle + 1
        return float_of_order(low)

    @triton.jit
    def _mass(logits, length, temperature, minimum, best, WIDTH: tl.constexpr):
        """Return the probability mass of the logits >= `minimum`."""
        total = tl.zeros([WIDTH], tl.int64)
        for at in range(0, length, WIDTH):
            x = tl.div_rn(_load(logits, at, length, WIDTH), temperature)
            total += tl.where(x >= minimum, masses(x - best), 0)
        return tl.sum(total, 0)

    @triton.jit
    def _score(
        logits, original, numbers, min_logits, output_ids, best, vocab, parts,
        MAPPED: tl.constexpr, CHANGED: tl.constexpr, FIELDS: tl.constexpr, CONTEXT_LENGTH: tl.constexpr,
        PART: tl.constexpr, BLOCK: tl.constexpr, OVERLAP: tl.constexpr,
    ):  # fmt: skip
        """Store the largest sum of logit and noise in one part of a row. See `best_scores`."""
        if OVERLAP:
            gdc_wait()
        row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
        numbers += row * FIELDS
        temperature, limit = _float(numbers), tl.load(min_logits + row)
        seed_low, seed_high = tl.load(numbers + 4), tl.load(numbers + 5)
        first, second = noise_keys(seed_low, seed_high, tl.load(numbers + CONTEXT_LENGTH))
        largest = tl.full([BLOCK], -(1 << 31), tl.int64) << 32
        for at in range(part * PART, tl.minimum((part + 1) * PART, vocab), BLOCK):
            outputs = at + tl.arange(0, BLOCK)
            token_ids = outputs
            if MAPPED:
                token_ids = tl.load(output_ids + outputs, mask=outputs < vocab, other=0).to(tl.int32)
            sums = _load(logits + row * vocab, at, vocab, BLOCK)
            unchanged = sums
            if CHANGED:
                unchanged = _load(original + row * vocab, at, vocab, BLOCK)
            kept = sums == sums
            if temperature > 0:
                sums = tl.div_rn(sums, temperature)
                kept = sums >= limit
                if tl.max(kept.to(tl.int32), 0) > 0:
                    sums += gumbel(token_ids, first, second)
            # Excluded tokens and lanes past the vocabulary rank below minus infinity.
            ranked = tl.where(kept & (outputs < vocab), order_of_float(sums), -(1 << 31))
            # NaN and infinity rank highest, so masks cannot hide them. Rows of minus infinity yield token 0, as on CPU.
            ranked = tl.where(unchanged < float("inf"), ranked, 0x7FFFFFFF).to(tl.int64)
            finite = (tl.abs(unchanged) < float("inf")).to(tl.int64)
            tokens = tl.where(sums > float("-inf"), token_ids, 0)
            largest = tl.maximum(largest, (ranked << 32) | (finite << 31) | (0x7FFFFFFF - tokens).to(tl.int64))
        tl.store(best + row * parts + part, tl.max(largest, 0))

    @triton.jit
    def _load(logits, at, length, WIDTH: tl.constexpr):
        index = at + tl.arange(0, WIDTH)
        return tl.load(logits + index, mask=index < length, other=float("-inf")).to(tl.float32)

    @triton.jit
    def _float(number):
        return tl.load(number).to(tl.float32, bitcast=True)
