"""Random numbers that both workers share without sending them: hashes of (seed, position, token).

The token chosen at a position has the largest `logit / temperature + gumbel(seed, position, token)`, which samples the
softmax. A draft that uses the same noise usually chooses the same token; whether it does has no influence on the
target's choice (drafter-invariant speculative decoding: Daliri, Musco and Suresh, 2025).
"""

import torch

_MASK64 = (1 << 64) - 1
# Torch runs operations of this few elements on one thread: waking other threads would take longer than the operation.
_PIECE = 1 << 14


def gumbel(seed: int, position: int, token_ids: torch.Tensor) -> torch.Tensor:
    """Standard Gumbel noise [n], float32, of n tokens (int32) at an absolute position of a sequence with this seed."""
    first, second = _keys(seed, position)
    pieces = token_ids.split(_PIECE) if token_ids.device.type == "cpu" else (token_ids,)
    return torch.cat([_gumbel(_mix(_mix(piece ^ first) + second)) for piece in pieces])


def _gumbel(bits: torch.Tensor) -> torch.Tensor:
    """Noise from independent bits (int32)."""
    # Floats near 0 keep all their bits, so the resolution is best for the largest noise, which decides the choice.
    uniform = bits.view(torch.uint32).float().add_(0.5).mul_(2.0**-32).clamp_(max=1 - 2.0**-24)
    return uniform.neg_().log1p_().neg_().log_().neg_()


def _keys(seed: int, position: int) -> tuple[int, int]:
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
    x = x ^ ((x >> 16) & 0xFFFF)
    x = x * 0x7FEB352D
    x = x ^ ((x >> 15) & 0x1FFFF)
    x = x * _signed(0x846CA68B)
    return x ^ ((x >> 16) & 0xFFFF)
