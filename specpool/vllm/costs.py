"""Seconds of vLLM's step by its tokens, learned from its steps alone: vLLM measures nothing when it starts. Pure."""

from bisect import bisect_left, bisect_right
from dataclasses import dataclass, field

from coordinator.drafting.costs import UNKNOWN_DRAFT, RoundCosts, StepTimes
from coordinator.drafting.drafting import FIRST_EXCHANGE

# Numbers of tokens that differ by more than this factor have times of their own.
NEXT = 1.15
# A time counts as at most this many times as long, or short, as steps of as many tokens were: machines have hiccups.
MOST_ERROR = 1.5
# Nothing is known of the first and the last point, which are nowhere near: tokens and seconds.
FIRST, LAST, UNKNOWN_SECONDS = 1, 2**17, 1.0


class LearnedTimes(StepTimes):
    """Seconds by tokens, between the numbers of tokens that have been seen.

    Until two numbers have been seen, twice as many tokens are believed to take twice as long, so that nothing is
    promised by drafts. Beyond the greatest number the time is on the line through the last two.
    """

    def __init__(self) -> None:
        super().__init__({FIRST: UNKNOWN_SECONDS, LAST: UNKNOWN_SECONDS * LAST})
        self._seen = [0.0, 0.0]
        self._first_is_known = False
        """Whether a step with the first point's number of tokens has been seen, and not only steps near it."""

    def seen(self, tokens: int) -> float:
        """Steps of about this number of tokens that have been seen."""
        return self._seen[self._nearest(tokens)] if self._is_near(tokens) else 0.0

    def observe(self, rows: int, seconds: float) -> None:
        """Takes in the time of a step with this number of tokens."""
        if not self._is_near(rows):
            self._insert(rows)
        else:
            believed = self(rows)
            seconds = min(MOST_ERROR * believed, max(believed / MOST_ERROR, seconds))
        super().observe(rows, seconds)
        self._first_is_known |= rows == FIRST
        self._extend()

    def _insert(self, tokens: int) -> None:
        at = bisect_left(self._rows, tokens)
        if self._rows[at] != tokens:
            self._seconds.insert(at, self._line(tokens))
            self._rows.insert(at, tokens)
            self._seen.insert(at, 0.0)

    def _nearest(self, tokens: int) -> int:
        at = bisect_right(self._rows, tokens) - 1
        return at if tokens - self._rows[at] <= self._rows[at + 1] - tokens else at + 1

    def _is_near(self, tokens: int) -> bool:
        at = self._nearest(tokens)
        near = self._rows[at]
        return self._seen[at] > 0 and max(near, tokens) <= NEXT * min(near, tokens)

    def _extend(self) -> None:
        """Puts the last point on the line through the last two that have been seen; after only one, on the line through
        zero and that one."""
        more, after = self._rows[-2], self._seconds[-2]
        known = len(self._rows) - 1 - (not self._first_is_known)
        some, before = (self._rows[-3], self._seconds[-3]) if known > 1 else (0, 0.0)
        slope = max(0.0, after - before) / (more - some)
        self._seconds[-1] = after + slope * (LAST - more)


@dataclass
class StepCosts(RoundCosts):
    """The parts of the time from one step of vLLM to the next: only the drafts take an exchange of messages."""

    draft: StepTimes = field(default_factory=lambda: StepTimes(UNKNOWN_DRAFT))
    verify: LearnedTimes = field(default_factory=LearnedTimes)
    exchange: float = FIRST_EXCHANGE

    def seconds(self, sequences: int, drafting: list[int], num_lookup_tokens: int = 0) -> float:
        """Seconds of a step with the drafts before it; see `RoundCosts`."""
        return super().seconds(sequences, drafting, num_lookup_tokens) - self.exchange
