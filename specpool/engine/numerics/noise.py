"""Random numbers that both workers share without sending them: hashes of (seed, position, token).

The token chosen at a position has the largest `logit / temperature + gumbel(seed, position, token)`, which samples the
softmax. A draft that uses the same noise usually chooses the same token; whether it does has no influence on the
target's choice (drafter-invariant speculative decoding: Daliri, Musco and Suresh, 2025).
"""

import math

import torch

from specpool.engine.numerics.elementary import negative_log, negative_log_of_rest

_MASK64 = (1 << 64) - 1
# Torch runs operations of this few elements on one thread: waking other threads would take longer than the operation.
_PIECE = 1 << 14
# More than rounding takes from the upper bound of the noise, and more than the bound ever exceeds the noise.
_MARGIN, _BOUND_ERROR = 1e-4, 3.0


def gumbel(seed: int, position: int, token_ids: torch.Tensor) -> torch.Tensor:
    """Standard Gumbel noise [n], float32, of n tokens (int32) at an absolute position of a sequence with this seed.

    The same bits on every device. The error is below 3 units in the last place of max(1, |noise|).
    """
    keys = noise_keys(seed, position)
    return torch.cat([_gumbel(_hash(piece, *keys)) for piece in _pieces(token_ids)])


def largest_with_noise(values: torch.Tensor, seed: int, position: int, token_ids: torch.Tensor) -> int:
    """The token with the largest sum of value and noise, the first of those with equal sums.

    The noise is computed only for tokens that an upper bound of it, which costs less, does not rule out.
    """
    keys = noise_keys(seed, position)
    bits = torch.cat([_hash(piece, *keys) for piece in _pieces(token_ids)])
    most = torch.cat([_gumbel_bound(b).add_(v) for b, v in zip(_pieces(bits), _pieces(values), strict=True)])
    largest = most.max()
    # NaN is not ruled out, nor is what the rounding of a large sum may have moved.
    left = (most < largest - (_BOUND_ERROR + largest.abs() * 2.0**-20)).logical_not_().nonzero().squeeze(1)
    sums = values[left] + _gumbel(bits[left])
    return int(token_ids[left[sums.argmax()]])


def _pieces(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return x.split(_PIECE) if x.device.type == "cpu" else (x,)


def _gumbel(bits: torch.Tensor) -> torch.Tensor:
    """Noise from independent bits (int32)."""
    return negative_log(negative_log_of_rest(_uniform(bits)))


def _gumbel_bound(bits: torch.Tensor) -> torch.Tensor:
    """An upper bound of the noise: -log(1 - u) is above u, and log2(1 + m) is above m for a mantissa of 1 + m."""
    half = ((bits >> 1) & 0x7FFFFFFF).float().add_(0.25)  # half of 2**32 * u
    return half.view(torch.int32).float().mul_(-math.log(2) / (1 << 23)).add_((127 + 31) * math.log(2) + _MARGIN)


def _uniform(bits: torch.Tensor) -> torch.Tensor:
    """Floats from 2**-33 to 1 - 2**-24. Near 0 they keep all bits, so the resolution is best for the largest noise,
    which decides the choice."""
    low = (bits & 0xFFFF).float().add_(0.5)
    high = (bits >> 16).bitwise_and_(0xFFFF).float().mul_(2.0**16)
    return high.add_(low).mul_(2.0**-32).clamp_(max=1 - 2.0**-24)


def _hash(token_ids: torch.Tensor, first: int, second: int) -> torch.Tensor:
    """Independent bits of each token, from both halves of a key."""
    return _mix(_mix(token_ids ^ first).add_(second))


def noise_keys(seed: int, position: int) -> tuple[int, int]:
    """The two halves of splitmix64(seed, position), as signed 32-bit integers."""
    x = (seed * 0x9E3779B97F4A7C15 + position * 0xD1B54A32D192ED03 + 0x632BE59BD9B4E019) & _MASK64
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK64
    x ^= x >> 31
    return _signed(x & 0xFFFFFFFF), _signed(x >> 32)


def _signed(x: int) -> int:
    return x - (1 << 32) if x >= 1 << 31 else x


def _mix(x: torch.Tensor) -> torch.Tensor:
    """A bijection of int32 in which every output bit depends on all input bits (constants of Wellons' lowbias32)."""
    x = (x >> 16).bitwise_and_(0xFFFF).bitwise_xor_(x).mul_(0x7FEB352D)
    x = (x >> 15).bitwise_and_(0x1FFFF).bitwise_xor_(x).mul_(_signed(0x846CA68B))
    return (x >> 16).bitwise_and_(0xFFFF).bitwise_xor_(x)
