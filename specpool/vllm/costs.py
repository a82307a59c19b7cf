"""Duration of vLLM's steps by number of tokens, learned while serving: vLLM reports no timings. Pure."""

from bisect import bisect_left, bisect_right
from dataclasses import dataclass, field

from specpool.drafting.costs import UNKNOWN_DRAFT, RoundCosts, StepTimes
from specpool.drafting.drafting import FIRST_EXCHANGE

# Token counts that differ by more than this factor are separate points.
NEARBY_RATIO = 1.15
# Clamp each duration to this factor of the expected one, because machines have hiccups.
MAX_ERROR = 1.5
# End points beyond all observations: minimum and maximum tokens, and a guess of the seconds per token.
FIRST, LAST, UNKNOWN_SECONDS = 1, 2**17, 1.0


class LearnedTimes(StepTimes):
    """Seconds by tokens, interpolated between observed points.

    Before two points are observed, assume that twice as many tokens take twice as long, so that drafts never look
    cheap. Beyond the last observed point, extrapolate through the last two.
    """

    def __init__(self) -> None:
        super().__init__({FIRST: UNKNOWN_SECONDS, LAST: UNKNOWN_SECONDS * LAST})
        self._seen = [0.0, 0.0]
        self._observed_first = False
        """Whether a step with exactly FIRST tokens was observed, not only steps nearby."""

    def seen(self, tokens: int) -> float:
        """Number of observed steps near this number of tokens."""
        return self._seen[self._nearest(tokens)] if self._is_near(tokens) else 0.0

    def observe(self, rows: int, seconds: float) -> None:
        """Record the duration of a step with this number of tokens."""
        if not self._is_near(rows):
            self._insert(rows)
        else:
            expected = self(rows)
            seconds = min(MAX_ERROR * expected, max(expected / MAX_ERROR, seconds))
        super().observe(rows, seconds)
        self._observed_first |= rows == FIRST
        self._extrapolate_last()

    def _insert(self, tokens: int) -> None:
        index = bisect_left(self._rows, tokens)
        if self._rows[index] != tokens:
            self._seconds.insert(index, self._line(tokens))
            self._rows.insert(index, tokens)
            self._seen.insert(index, 0.0)

    def _nearest(self, tokens: int) -> int:
        index = bisect_right(self._rows, tokens) - 1
        return index if tokens - self._rows[index] <= self._rows[index + 1] - tokens else index + 1

    def _is_near(self, tokens: int) -> bool:
        index = self._nearest(tokens)
        near = self._rows[index]
        return self._seen[index] > 0 and max(near, tokens) <= NEARBY_RATIO * min(near, tokens)

    def _extrapolate_last(self) -> None:
        """Move the last point onto the line through the last two observed points, or through zero and a single one."""
        tokens, seconds = self._rows[-2], self._seconds[-2]
        observed = len(self._rows) - 1 - (not self._observed_first)
        before = (self._rows[-3], self._seconds[-3]) if observed > 1 else (0, 0.0)
        slope = max(0.0, seconds - before[1]) / (tokens - before[0])
        self._seconds[-1] = seconds + slope * (LAST - tokens)


@dataclass
class StepCosts(RoundCosts):
    """Costs of a vLLM step and the drafting before it. Only drafting exchanges messages."""

    draft: StepTimes = field(default_factory=lambda: StepTimes(UNKNOWN_DRAFT))
    verify: LearnedTimes = field(default_factory=LearnedTimes)
    exchange: float = FIRST_EXCHANGE

    def seconds(self, sequences: int, drafting: list[int], num_lookup_tokens: int = 0) -> float:
        """Seconds of drafting and the step; see `RoundCosts`."""
        return super().seconds(sequences, drafting, num_lookup_tokens) - self.exchange
