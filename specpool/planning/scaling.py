"""Growth of the agreement with a target with the size of a draft. Pure.

Acceptance is linear in the logarithm of the size (Yan et al. 2025: Scaling Laws for Speculative Decoding, arXiv
2505.07858).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import log10
from statistics import linear_regression


@dataclass(frozen=True)
class LogLinear:
    """agreement = intercept + per_decade * log10(parameters), kept between 0 and 1."""

    intercept: float
    per_decade: float

    def __call__(self, parameters: float) -> float:
        """The agreement that a draft of this size can be expected to reach."""
        return min(1.0, max(0.0, self.intercept + self.per_decade * log10(parameters)))


def fit(sizes: Sequence[int], agreement: Sequence[float]) -> LogLinear | None:
    """Fits by least squares; None without two drafts of different sizes."""
    if len(set(sizes)) < 2:
        return None
    slope, intercept = linear_regression([log10(size) for size in sizes], agreement)
    return LogLinear(intercept, slope)


def other_sizes(sizes: Sequence[int], target: int) -> list[int]:
    """Round sizes to predict for: from a tenth of the smallest draft up to the target."""
    rounded = (first * 10**decade for decade in range(len(str(target))) for first in (1, 3))
    return [size for size in rounded if min(sizes) / 10 <= size < target]
