"""Random noise that both workers compute alike, as a hash of (seed, position, token).

The sampled token maximizes `logit / temperature + gumbel(seed, position, token)`, which samples the softmax. A draft
with the same noise usually picks the same token, and never influences the target's choice (drafter-invariant
speculative decoding: Daliri, Musco and Suresh, 2025).
"""

import math

import torch

from specpool.engine.numerics.elementary import negative_log, negative_log1m

_MASK64 = (1 << 64) - 1
# Few enough elements that torch uses one thread; waking others would take longer.
_CHUNK = 1 << 14
# Exceeds the rounding error of the noise bound, and the distance between bound and noise.
_MARGIN, _BOUND_ERROR = 1e-4, 3.0


def gumbel(seed: int, position: int, token_ids: torch.Tensor) -> torch.Tensor:
    """Return standard Gumbel noise [n] in float32 for n tokens (int32) at an absolute position.

    The bits are the same on every device. The error is below 3 units in the last place of max(1, |noise|).
    """
    keys = noise_keys(seed, position)
    return torch.cat([_gumbel(_hash(chunk, *keys)) for chunk in _chunks(token_ids)])


def argmax_with_noise(values: torch.Tensor, seed: int, position: int, token_ids: torch.Tensor) -> int:
    """Return the token with the largest sum of value and noise; the first one wins ties.

    A cheap upper bound of the noise rules out most tokens, so their noise is never computed.
    """
    keys = noise_keys(seed, position)
    bits = torch.cat([_hash(chunk, *keys) for chunk in _chunks(token_ids)])
    bounds = torch.cat([_gumbel_bound(b).add_(v) for b, v in zip(_chunks(bits), _chunks(values), strict=True)])
    largest = bounds.max()
    # Keep NaN, and sums that rounding may have moved below the threshold.
    remaining = (bounds < largest - (_BOUND_ERROR + largest.abs() * 2.0**-20)).logical_not_().nonzero().squeeze(1)
    sums = values[remaining] + _gumbel(bits[remaining])
    return int(token_ids[remaining[sums.argmax()]])


def _chunks(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return x.split(_CHUNK) if x.device.type == "cpu" else (x,)


def _gumbel(bits: torch.Tensor) -> torch.Tensor:
    return negative_log(negative_log1m(_uniform(bits)))


def _gumbel_bound(bits: torch.Tensor) -> torch.Tensor:
    """Return an upper bound of the noise: -log(1 - u) > u, and log2(1 + m) > m for a mantissa 1 + m."""
    half = ((bits >> 1) & 0x7FFFFFFF).float().add_(0.25)  # half of 2**32 * u
    return half.view(torch.int32).float().mul_(-math.log(2) / (1 << 23)).add_((127 + 31) * math.log(2) + _MARGIN)


def _uniform(bits: torch.Tensor) -> torch.Tensor:
    """Convert bits to floats from 2**-33 to 1 - 2**-24.

    Values near 0 keep all bits: they give the largest noise, which decides the choice.
    """
    low = (bits & 0xFFFF).float().add_(0.5)
    high = (bits >> 16).bitwise_and_(0xFFFF).float().mul_(2.0**16)
    return high.add_(low).mul_(2.0**-32).clamp_(max=1 - 2.0**-24)


def _hash(token_ids: torch.Tensor, first: int, second: int) -> torch.Tensor:
    return _mix(_mix(token_ids ^ first).add_(second))


def noise_keys(seed: int, position: int) -> tuple[int, int]:
    """Return both halves of splitmix64(seed, position) as signed 32-bit integers."""
    x = (seed * 0x9E3779B97F4A7C15 + position * 0xD1B54A32D192ED03 + 0x632BE59BD9B4E019) & _MASK64
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK64
    x ^= x >> 31
    return _signed(x & 0xFFFFFFFF), _signed(x >> 32)


def _signed(x: int) -> int:
    return x - (1 << 32) if x >= 1 << 31 else x


def _mix(x: torch.Tensor) -> torch.Tensor:
    """Mix all input bits into every output bit, bijectively (constants of Wellons' lowbias32)."""
    x = (x >> 16).bitwise_and_(0xFFFF).bitwise_xor_(x).mul_(0x7FEB352D)
    x = (x >> 15).bitwise_and_(0x1FFFF).bitwise_xor_(x).mul_(_signed(0x846CA68B))
    return (x >> 16).bitwise_and_(0xFFFF).bitwise_xor_(x)
