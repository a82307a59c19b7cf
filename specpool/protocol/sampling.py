"""The sampling rules of a sequence, and the valid range of each parameter."""

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
"""The smallest and the largest valid value of each parameter."""

# Decimal digits to which float32, which the wire carries, can tell numbers of this size apart.
_DIGITS = 6


@dataclass(frozen=True)
class SamplingParams:
    """Sampling rules of a request; the defaults are greedy decoding of unchanged logits."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    """Tokens that may not be chosen before `min_tokens` tokens have been generated."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    seed: int = 0
    prompt_length: int = 0
    """Number of the sequence's first tokens that came with the request."""

    @property
    def leaves_logits(self) -> bool:
        """Whether no rule changes a logit, whatever tokens came before."""
        penalties = self.repetition_penalty != 1 or self.frequency_penalty or self.presence_penalty
        return not (penalties or self.min_tokens or self.logit_bias)

    @property
    def is_argmax(self) -> bool:
        """Whether the token with the largest logit is always chosen."""
        return self.temperature == 0 and self.leaves_logits


@dataclass(frozen=True)
class TokenLogprobs:
    """Log-probabilities at one position under the model's own softmax, before any rule changes a logit."""

    logprob: float
    """Log-probability of the chosen token."""
    top: tuple[tuple[int, float], ...]
    """The (token, log-probability) pairs of the most probable tokens, as many as requested."""


def in_range(field: str, value: float, limits: tuple[float, float]) -> float:
    """The value, moved onto its limit if only rounding took it beyond. InvalidArgumentError."""
    least, most = limits
    if not (math.isfinite(value) and least <= round(value, _DIGITS) <= most):
        limit = f"from {least:g} to {most:g}" if math.isfinite(most) else f"at least {least:g}"
        raise InvalidArgumentError(field, f"{value:g} is out of range: it must be {limit}")
    return min(max(value, least), most)
