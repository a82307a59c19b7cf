"""Sampling parameters of a sequence and their valid ranges."""

import math
from dataclasses import dataclass

from specpool.protocol.errors import InvalidArgumentError

RANGES: dict[str, tuple[float, float]] = {
    "temperature": (0, 100),
    "top_p": (0, 1),
    "top_k": (-1, math.inf),
    "min_p": (0, 1),
    "repetition_penalty": (0.01, 100),
    "frequency_penalty": (-2, 2),
    "presence_penalty": (-2, 2),
    "logit_bias": (-100, 100),
}
"""Minimum and maximum of each parameter."""

# Decimal digits that survive float32 on the wire, for values of this size.
_DIGITS = 6


@dataclass(frozen=True)
class SamplingParams:
    """Sampling parameters of a request. The defaults mean greedy decoding."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    """Tokens that are masked until `min_tokens` tokens are generated."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    seed: int = 0
    prompt_length: int = 0
    """Number of prompt tokens at the start of the sequence."""

    @property
    def leaves_logits(self) -> bool:
        """Whether the parameters never change a logit."""
        penalties = self.repetition_penalty != 1 or self.frequency_penalty or self.presence_penalty
        return not (penalties or self.min_tokens or self.logit_bias)

    @property
    def is_argmax(self) -> bool:
        """Whether the largest logit always wins."""
        return self.temperature == 0 and self.leaves_logits


@dataclass(frozen=True)
class TokenLogprobs:
    """Log-probabilities at one position under the model's softmax, before sampling parameters apply."""

    logprob: float
    """Log-probability of the chosen token."""
    top: tuple[tuple[int, float], ...]
    """(token, log-probability) of the most probable tokens, as many as requested."""


def in_range(field: str, value: float, limits: tuple[float, float]) -> float:
    """Return the value, clamped to its limits if it exceeds them only by rounding. Raises InvalidArgumentError."""
    minimum, maximum = limits
    if not (math.isfinite(value) and minimum <= round(value, _DIGITS) <= maximum):
        accepted = f"from {minimum:g} to {maximum:g}" if math.isfinite(maximum) else f"at least {minimum:g}"
        limit = minimum if value < minimum or math.isinf(maximum) else maximum
        raise InvalidArgumentError(field, f"{value:g} is out of range: it must be {accepted}", limit=limit)
    return min(max(value, minimum), maximum)
