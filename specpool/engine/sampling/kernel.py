"""Batch sampling on a GPU: the same choices as `specpool.engine.sampling.sampler`, for all rows in two launches.

The first launch finds the smallest logit that min_p, top_k and top_p keep, with one program per row. The second adds
noise and finds the largest sum, with as many programs per row as the vocabulary needs. Both use the operations of
`specpool.engine.numerics.elementary` without fused multiply-adds, and count probability mass in integers, whose sums
do not depend on their order. A token therefore depends on its row alone, and a CPU chooses the same token.
"""

import math
import struct
from collections.abc import Sequence

import torch

from specpool.engine.numerics.elementary import (
    EXP_TERMS,
    LEAST_EXPONENT,
    LOG2_E,
    LOG2_HIGH,
    LOG2_LOW,
    LOG_TERMS,
    MANTISSA_BITS,
    MANTISSA_MASK,
    MASS_BITS,
    ROUNDS,
    ROUNDS_BITS,
    SQRT_HALF_BITS,
)
from specpool.engine.numerics.noise import noise_keys
from specpool.engine.numerics.triton_compat import UNFUSED
from specpool.protocol.sampling import SamplingParams

try:
    import triton
    import triton.language as tl
except ImportError:  # Triton comes with the CUDA builds of torch only
    triton = None

# Logits that a program looks at together while it searches for limits, and how many it can keep for the search.
FEW = 4096
# Logits of one program that adds noise, and how many it looks at together.
PART, BLOCK = 8192, 1024
SEARCH_WARPS, SCORE_WARPS = 8, 4
# 32-bit numbers of a row: temperature, top_p, log(min_p), top_k, both halves of the key of its noise.
FIELDS = 6
_LARGEST_ID = (1 << 31) - 1


def has_kernels(device: torch.device) -> bool:
    """Whether `sample_rows` can be tried on this device."""
    return device.type == "cuda" and triton is not None


def sample_rows(logits: torch.Tensor, rules: Sequence[tuple[SamplingParams | None, int]]) -> list[int]:
    """The token after each of n contexts. `logits` is [n, vocab_size], float32, bfloat16 or float16, with bias and
    penalties. `rules`: each row's parameters, None for its largest logit, and the length of its context."""
    if not rules:
        return []
    logits = logits.contiguous()
    rows, vocab = logits.shape
    parts = triton.cdiv(vocab, PART)
    numbers = torch.tensor(
        [_numbers(params, length, vocab) for params, length in rules],
        dtype=torch.int32, pin_memory=logits.device.type == "cuda",
    ).to(logits.device, non_blocking=True)  # fmt: skip
    least = torch.full((rows,), -torch.inf, device=logits.device)
    if any(params is not None and _has_limits(params) for params, _ in rules):
        few = torch.empty(rows, FEW, dtype=logits.dtype, device=logits.device)
        _find_least[(rows,)](
            logits, numbers, few, least, vocab, FIELDS=FIELDS, FEW=FEW, num_warps=SEARCH_WARPS, **UNFUSED
        )
    best = torch.empty(rows, parts, dtype=torch.int64, device=logits.device)
    _score[(rows, parts)](
        logits, numbers, least, best, vocab, parts,
        FIELDS=FIELDS, PART=PART, BLOCK=BLOCK, num_warps=SCORE_WARPS, **UNFUSED,
    )  # fmt: skip
    chosen: list[int] = (_LARGEST_ID - (best.amax(1) & _LARGEST_ID)).tolist()
    return chosen


def _has_limits(params: SamplingParams) -> bool:
    return params.temperature > 0 and (params.top_k > 0 or params.top_p < 1 or params.min_p > 0)


def _numbers(params: SamplingParams | None, length: int, vocab: int) -> tuple[int, ...]:
    """The `FIELDS` of a row, as int32."""
    if params is None or params.temperature == 0:
        return (0,) * FIELDS
    top_k = params.top_k if 0 < params.top_k < vocab else 0
    log_min_p = math.log(params.min_p) if params.min_p > 0 else -math.inf
    floats = [_bits(x) for x in (params.temperature, params.top_p, log_min_p)]
    return (*floats, top_k, *noise_keys(params.seed, length))


def _bits(x: float) -> int:
    """The bits of x as a float32."""
    bits: int = struct.unpack("i", struct.pack("f", x))[0]
    return bits


if triton is not None:
    # Kernels can read constants of Triton only.
    _LOG, _LOG_COUNT = tl.constexpr(LOG_TERMS), tl.constexpr(len(LOG_TERMS))
    _EXP, _EXP_COUNT = tl.constexpr(EXP_TERMS), tl.constexpr(len(EXP_TERMS))
    _SQRT_HALF_BITS, _MANTISSA_BITS = tl.constexpr(SQRT_HALF_BITS), tl.constexpr(MANTISSA_BITS)
    _MANTISSA_MASK, _MASS_BITS = tl.constexpr(MANTISSA_MASK), tl.constexpr(MASS_BITS)
    _LOG2_HIGH, _LOG2_LOW, _LOG2_E = tl.constexpr(LOG2_HIGH), tl.constexpr(LOG2_LOW), tl.constexpr(LOG2_E)
    _ROUNDS, _ROUNDS_BITS = tl.constexpr(ROUNDS), tl.constexpr(ROUNDS_BITS)
    _LEAST_EXPONENT = tl.constexpr(LEAST_EXPONENT)

    @triton.jit
    def _find_least(logits, numbers, few, least, vocab, FIELDS: tl.constexpr, FEW: tl.constexpr):
        """Stores the least logit, divided by the temperature, that a row's limits leave. `few`: scratch, [n, FEW]."""
        row = tl.program_id(0).to(tl.int64)
        numbers += row * FIELDS
        temperature, top_p, log_min_p = _float(numbers), _float(numbers + 1), _float(numbers + 2)
        top_k = tl.load(numbers + 3)
        limited = (log_min_p > float("-inf")) | (top_k > 0) | (top_p < 1)
        if (temperature > 0) & limited:
            logits += row * vocab
            few += row * FEW
            largest = tl.full([FEW], float("-inf"), tl.float32)
            for at in range(0, vocab, FEW):
                largest = tl.maximum(largest, _load(logits, at, vocab, FEW))
            best = tl.div_rn(tl.max(largest, 0), temperature)
            if (best > float("-inf")) & (best < float("inf")):
                limit = best + log_min_p
                if (top_k > 0) | (top_p < 1):
                    tl.store(few + tl.arange(0, FEW), largest)
                    tl.debug_barrier()
                    limit = _search(logits, few, vocab, temperature, top_k, top_p, best, limit, FEW)
                tl.store(least + row, limit)

    @triton.jit
    def _search(logits, few, vocab, temperature, top_k, top_p, best, limit, FEW: tl.constexpr):
        """The largest of `limit` and the limits by top_k and top_p. `few` holds the largest logit of each lane, then
        the logits from `begin` on: if there is room for all of them, the search reads no others."""
        rank = tl.where(top_k > 0, top_k, FEW // 2)
        begin = limit
        if rank <= FEW:  # the lanes with a logit that large are `rank` or more, so as many logits are kept
            begin = _of_rank(few, FEW, temperature, rank, limit, best, FEW)
            tl.debug_barrier()
        count = _keep(logits, few, vocab, temperature, begin, FEW)
        tl.debug_barrier()
        source, length = logits, vocab
        if count <= FEW:
            source, length = few, count
        if top_k > 0:
            limit = _of_rank(source, length, temperature, top_k, begin, best, FEW)
        if top_p < 1:
            begin = tl.maximum(begin, limit)
            if top_k > 0:  # nothing below `begin` is left
                whole = _mass(source, length, temperature, begin, best, FEW)
            else:
                whole = _mass(logits, vocab, temperature, limit, best, FEW)
            goal = whole.to(tl.float64) * top_p.to(tl.float64)
            if _mass(source, length, temperature, begin, best, FEW).to(tl.float64) < goal:
                source, length, begin = logits, vocab, limit
            limit = _nucleus(source, length, temperature, goal, begin, best, FEW)
        return limit

    @triton.jit
    def _keep(logits, few, vocab, temperature, begin, WIDTH: tl.constexpr):
        """Copies the logits from `begin` on, as far as there is room for them; returns their number."""
        count = tl.zeros([], tl.int32)
        for at in range(0, vocab, WIDTH):
            x = _load(logits, at, vocab, WIDTH)
            kept = (tl.div_rn(x, temperature) >= begin) & (at + tl.arange(0, WIDTH) < vocab)
            place = count + tl.cumsum(kept.to(tl.int32), 0) - 1
            tl.store(few + place, x, mask=kept & (place < WIDTH))
            count += tl.sum(kept.to(tl.int32), 0)
        return count

    @triton.jit
    def _of_rank(logits, length, temperature, rank, low, high, WIDTH: tl.constexpr):
        """The logit that `rank` of them reach, or `low` if fewer reach any above it; `high`: the largest."""
        low, high = _ordered(low).to(tl.int64), _ordered(high).to(tl.int64)
        while low < high:
            middle = (low + high + 1) >> 1
            least = _unordered(middle)
            counts = tl.zeros([WIDTH], tl.int32)
            for at in range(0, length, WIDTH):
                counts += (tl.div_rn(_load(logits, at, length, WIDTH), temperature) >= least).to(tl.int32)
            if tl.sum(counts, 0) >= rank:
                low = middle
            else:
                high = middle - 1
        return _unordered(low)

    @triton.jit
    def _nucleus(logits, length, temperature, goal, low, high, WIDTH: tl.constexpr):
        """The least logit, from `low` on, above which the mass is below `goal`; `high`: the largest."""
        best = high
        low, high = _ordered(low).to(tl.int64), _ordered(high).to(tl.int64)
        while low < high:
            middle = (low + high) >> 1
            if _mass(logits, length, temperature, _unordered(middle + 1), best, WIDTH).to(tl.float64) < goal:
                high = middle
            else:
                low = middle + 1
        return _unordered(low)

    @triton.jit
    def _mass(logits, length, temperature, least, best, WIDTH: tl.constexpr):
        """Mass of the logits from `least` on."""
        total = tl.zeros([WIDTH], tl.int64)
        for at in range(0, length, WIDTH):
            x = tl.div_rn(_load(logits, at, length, WIDTH), temperature)
            total += tl.where(x >= least, _masses(x - best), 0)
        return tl.sum(total, 0)

    @triton.jit
    def _score(
        logits, numbers, least, best, vocab, parts,
        FIELDS: tl.constexpr, PART: tl.constexpr, BLOCK: tl.constexpr,
    ):  # fmt: skip
        """Stores the largest sum of logit and noise in one part of a row, with its token in the low bits."""
        row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
        numbers += row * FIELDS
        temperature, limit = _float(numbers), tl.load(least + row)
        first, second = tl.load(numbers + 4), tl.load(numbers + 5)
        most = tl.full([BLOCK], -(1 << 31), tl.int64) << 32
        for at in range(part * PART, tl.minimum((part + 1) * PART, vocab), BLOCK):
            token_ids = at + tl.arange(0, BLOCK)
            sums = _load(logits + row * vocab, at, vocab, BLOCK)
            kept = sums == sums
            if temperature > 0:
                sums = tl.div_rn(sums, temperature)
                kept = sums >= limit
                if tl.max(kept.to(tl.int32), 0) > 0:
                    sums += _gumbel(token_ids, first, second)
            # Those left out rank below minus infinity, and lanes beyond the vocabulary last.
            ranked = tl.where(kept & (token_ids < vocab), _ordered(sums), -(1 << 31)).to(tl.int64)
            most = tl.maximum(most, (ranked << 32) | (0x7FFFFFFF - token_ids).to(tl.int64))
        tl.store(best + row * parts + part, tl.max(most, 0))

    @triton.jit
    def _gumbel(token_ids, first, second):
        """`specpool.engine.numerics.noise.gumbel`."""
        bits = _mix(_mix((token_ids ^ first).to(tl.uint32, bitcast=True)) + second.to(tl.uint32, bitcast=True))
        u = ((bits >> 16).to(tl.float32) * 65536.0 + ((bits & 0xFFFF).to(tl.float32) + 0.5)) * 2.0**-32
        u = tl.minimum(u, 1 - 2.0**-24)
        mantissa, exponent = _split(1.0 - u)
        mantissa, exponent = _split(_log(tl.where(exponent == 0, u * -1.0, mantissa - 1.0), exponent) * -1.0)
        return _log(mantissa - 1.0, exponent) * -1.0

    @triton.jit
    def _mix(x):
        x = (x ^ (x >> 16)) * 0x7FEB352D
        x = (x ^ (x >> 15)) * 0x846CA68B
        return x ^ (x >> 16)

    @triton.jit
    def _split(x):
        shifted = x.to(tl.int32, bitcast=True) - _SQRT_HALF_BITS
        mantissa = (shifted & _MANTISSA_MASK) + _SQRT_HALF_BITS
        return mantissa.to(tl.float32, bitcast=True), shifted >> _MANTISSA_BITS

    @triton.jit
    def _log(f, exponent):
        powers, square = exponent.to(tl.float32), f * f
        total = _polynomial(f, _LOG, _LOG_COUNT) * f * square
        return total + powers * _LOG2_LOW + square * -0.5 + f + powers * _LOG2_HIGH

    @triton.jit
    def _masses(x):
        """`specpool.engine.numerics.elementary.masses`."""
        x = tl.maximum(x, _LEAST_EXPONENT)
        rounded = x * _LOG2_E + _ROUNDS
        exponent = rounded.to(tl.int32, bitcast=True) - _ROUNDS_BITS
        rounded -= _ROUNDS
        x = x + rounded * -_LOG2_HIGH + rounded * -_LOG2_LOW
        power = _polynomial(x, _EXP, _EXP_COUNT) * (x * x) + x + 1.0
        scaled = power.to(tl.int32, bitcast=True) + ((exponent + _MASS_BITS) << _MANTISSA_BITS)
        return scaled.to(tl.float32, bitcast=True).to(tl.int64)

    @triton.jit
    def _polynomial(x, TERMS: tl.constexpr, COUNT: tl.constexpr):
        total = x * TERMS[0] + TERMS[1]
        for i in tl.static_range(2, COUNT):
            total = total * x + TERMS[i]
        return total

    @triton.jit
    def _load(logits, at, length, WIDTH: tl.constexpr):
        index = at + tl.arange(0, WIDTH)
        return tl.load(logits + index, mask=index < length, other=float("-inf")).to(tl.float32)

    @triton.jit
    def _float(number):
        return tl.load(number).to(tl.float32, bitcast=True)

    @triton.jit
    def _ordered(x):
        """Integers in the order of floats, with one zero."""
        bits = x.to(tl.int32, bitcast=True)
        bits = tl.where(bits == -(1 << 31), 0, bits)
        return bits ^ ((bits >> 31) & 0x7FFFFFFF)

    @triton.jit
    def _unordered(x):
        bits = x.to(tl.int32)
        return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
