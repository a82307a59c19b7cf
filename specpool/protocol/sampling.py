"""Sampling parameters of a sequence and their valid ranges."""

import math
from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace

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

MAX_TAG_TOKENS = 64
"""Maximum tokens of a reasoning tag."""

# Decimal digits that survive float32 on the wire, for values of this size.
_DIGITS = 6


@dataclass(frozen=True)
class Reasoning:
    """Limits on a sequence's reasoning block."""

    begin: tuple[int, ...]
    """Tokens of the begin tag."""
    end: tuple[int, ...]
    """Tokens of the end tag."""
    starts_inside: bool
    """Whether the prompt ends within a reasoning block."""
    max_tokens: int | None
    """Maximum number of tokens in the block. None: unlimited."""
    grammar_after: bool
    """Whether the constraint applies only after the block."""
    leading: tuple[int, ...] = ()
    """Whitespace tokens, one of which may precede the begin tag if the grammar allows it."""

    @property
    def largest_id(self) -> int:
        """The largest token id."""
        return max(*self.begin, *self.end, *self.leading)


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
    grammar: str = ""
    """Grammar of the generated text, in one of llguidance's formats. Empty: none."""
    reasoning: Reasoning | None = None
    """Limits on the reasoning block. None: no limits."""

    def within(self, vocab_size: int) -> "SamplingParams":
        """Return the parameters for a smaller vocabulary, such as a draft's.

        Drops tokens outside it. If a tag has such tokens, drops the limits on reasoning and the grammar after it.
        """
        reasoning, grammar, vocab = self.reasoning, self.grammar, range(vocab_size)
        if reasoning is not None and reasoning.largest_id not in vocab:
            grammar = "" if reasoning.grammar_after else grammar
            reasoning = None
        return replace(
            self,
            stop_token_ids=tuple(token for token in self.stop_token_ids if token in vocab),
            logit_bias=tuple((token, bias) for token, bias in self.logit_bias if token in vocab),
            reasoning=reasoning,
            grammar=grammar,
        )

    @property
    def leaves_logits(self) -> bool:
        """Whether the parameters never change a logit."""
        return self.leaves_legal_logits and not self.grammar and self.reasoning is None

    @property
    def leaves_legal_logits(self) -> bool:
        """Whether only the grammar and the limits on reasoning change logits."""
        return not (self.has_penalties or self.min_tokens or self.logit_bias)

    @property
    def may_force_tokens(self) -> bool:
        """Whether some positions may allow only one token."""
        return bool(self.grammar) or (self.reasoning is not None and self.reasoning.max_tokens is not None)

    @property
    def has_penalties(self) -> bool:
        """Whether a token's logit depends on how often it occurs."""
        return bool(self.repetition_penalty != 1 or self.frequency_penalty or self.presence_penalty)

    @property
    def is_argmax(self) -> bool:
        """Whether the largest logit always wins."""
        return self.temperature == 0 and self.leaves_logits


@dataclass(frozen=True)
class TokenLogprobs:
    """Log-probabilities at one position under the model's softmax, before sampling parameters apply."""

    logprob: float
    """Log-probability of the chosen token."""
    top_token_ids: "array[int]"
    """The most probable tokens, as many as requested."""
    top_logprobs: "array[float]"
    """Log-probabilities of `top_token_ids`."""


@dataclass(frozen=True, slots=True)
class Logprobs:
    """Log-probabilities of consecutive tokens, in 4 bytes per token and 8 per alternative."""

    num_top: int = 0
    """Number of most probable tokens at each position."""
    logprobs: "array[float]" = field(default_factory=lambda: array("f"))
    """Log-probability of each token."""
    top_token_ids: "array[int]" = field(default_factory=lambda: array("I"))
    """The most probable tokens of all positions, `num_top` for each."""
    top_logprobs: "array[float]" = field(default_factory=lambda: array("f"))

    @classmethod
    def of(cls, num_top: int, positions: Iterable[tuple[float, Iterable[int], Iterable[float]]]) -> "Logprobs":
        """Pack the log-probability, top tokens and their log-probabilities of each position."""
        packed = cls(num_top)
        for logprob, top_token_ids, top_logprobs in positions:
            packed.logprobs.append(logprob)
            packed.top_token_ids.extend(top_token_ids)
            packed.top_logprobs.extend(top_logprobs)
        return packed

    def first(self, count: int) -> "Logprobs":
        """Return the log-probabilities of the first `count` positions."""
        top = count * self.num_top
        return Logprobs(self.num_top, self.logprobs[:count], self.top_token_ids[:top], self.top_logprobs[:top])

    def __len__(self) -> int:
        return len(self.logprobs)

    def __iter__(self) -> Iterator[TokenLogprobs]:
        for position, logprob in enumerate(self.logprobs):
            top = slice(position * self.num_top, (position + 1) * self.num_top)
            yield TokenLogprobs(logprob, self.top_token_ids[top], self.top_logprobs[top])

    def __getitem__(self, positions: slice) -> "Logprobs":
        start, stop, _ = positions.indices(len(self))
        if (start, stop) == (0, len(self)):
            return self
        top = slice(start * self.num_top, stop * self.num_top)
        return Logprobs(self.num_top, self.logprobs[start:stop], self.top_token_ids[top], self.top_logprobs[top])

    def extend(self, others: "Logprobs") -> None:
        """Append log-probabilities with as many top tokens per position."""
        self.logprobs.extend(others.logprobs)
        self.top_token_ids.extend(others.top_token_ids)
        self.top_logprobs.extend(others.top_logprobs)


NO_LOGPROBS = Logprobs()


def in_range(field: str, value: float, limits: tuple[float, float]) -> float:
    """Return the value, clamped to its limits if it exceeds them only by rounding. Raises InvalidArgumentError."""
    minimum, maximum = limits
    if not (math.isfinite(value) and minimum <= round(value, _DIGITS) <= maximum):
        accepted = f"from {minimum:g} to {maximum:g}" if math.isfinite(maximum) else f"at least {minimum:g}"
        limit = minimum if value < minimum or math.isinf(maximum) else maximum
        raise InvalidArgumentError(field, f"{value:g} is out of range: it must be {accepted}", limit=limit)
    return min(max(value, minimum), maximum)
