"""Comparisons of results: with float64, and bit for bit between row counts."""

from collections.abc import Callable, Sequence

import torch

# Maximum relative error: about twice what rounding the inputs and the result causes.
TOLERANCES = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 8e-3}
EPS = 1e-6


def row_counts(maximum: int) -> list[int]:
    """Row counts to compare: all small ones, then multiples of 32 and their neighbours."""
    near = (count + step for count in range(96, maximum + 1, 32) for step in (-1, 0, 1))
    return sorted({*range(1, min(64, maximum)), *(count for count in near if count <= maximum), maximum})


def counts_that_differ(
    run: Callable[[slice], torch.Tensor], together: torch.Tensor, counts: Sequence[int]
) -> list[int]:
    """Row counts at which the last rows differ from the same rows in the largest batch."""
    total = len(together)
    return [count for count in counts if not torch.equal(run(slice(total - count, total)), together[total - count :])]


def error(result: torch.Tensor, expected: torch.Tensor) -> float:
    """The norm of the error, relative to the norm of the float64 result."""
    return float((result.double() - expected).norm() / expected.norm())


def rms_norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """RMSNorm in float64."""
    return x * (x.square().mean(-1, keepdim=True) + EPS).rsqrt() * weight.double()
