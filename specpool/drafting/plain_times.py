"""Measured wall time of plain rounds, the baseline for all drafts. Pure, without a clock.

The cost model only translates between batch sizes. Where plain rounds of the same size were measured, a wrong model
changes nothing.
"""

import statistics
from collections import deque
from collections.abc import Iterable
from itertools import islice

from specpool.drafting.costs import MAX_RISE, RECENT, WEIGHT, RoundCosts

# Seconds for which a plain round counts.
RECENT_SECONDS = 30.0
# Plain rounds needed before any comparison.
MIN_PLAIN = RECENT // 5


def size_class(sequences: int) -> int:
    """Class of batch sizes that share measurements: 1, 2 to 3, 4 to 7, and so on."""
    return sequences.bit_length()


class PlainTimes:
    """Mean seconds of a plain round by its number of sequences.

    The median of recent rounds times the long-term ratio of mean to median: one stalled round must not distort the
    estimate, but a machine that stalls often slows down drafting and plain rounds alike.
    """

    def __init__(self, costs: RoundCosts) -> None:
        """`costs`: the cost model, of which only ratios are used."""
        self.costs = costs
        self._classes: dict[int, deque[tuple[float, int, float]]] = {}
        """By class of batch sizes: end of the round, number of sequences, and seconds."""
        self._latest: deque[tuple[float, int, float]] = deque(maxlen=RECENT)
        """The same, of all sizes."""
        self._tail = 1.0

    def observe(self, now: float, sequences: int, seconds: float) -> None:
        """Learn from a plain round that ended at `now`."""
        one = now, sequences, seconds
        self._classes.setdefault(size_class(sequences), deque(maxlen=RECENT)).append(one)
        self._latest.append(one)
        if len(self._latest) == RECENT:
            # Compare the middle round with those before and after it: a lasting change of speed is not a tail.
            values = list(self._values(self._latest))
            tail = min(MAX_RISE, values[RECENT // 2] / statistics.median(values))
            self._tail += WEIGHT * (tail - self._tail)

    def needs_round(self, now: float, sequences: int) -> bool:
        """Whether too few recent plain rounds are known to judge drafts at this size."""
        self._forget(now)
        return len(self._latest) < MIN_PLAIN or not self._classes.get(size_class(sequences))

    def seconds(self, sequences: int) -> float | None:
        """Mean seconds of a plain round; None before enough of them were measured."""
        own = self._classes.get(size_class(sequences), ())
        rounds = [*own, *islice(reversed(self._latest), max(0, MIN_PLAIN - len(own)))]
        if len(rounds) < MIN_PLAIN:
            return None
        return statistics.median(self._values(rounds)) * self._tail * self.costs.seconds(sequences, [])

    def _values(self, rounds: Iterable[tuple[float, int, float]]) -> Iterable[float]:
        """Measured times relative to those of the cost model."""
        believed: dict[int, float] = {}
        for _, sequences, seconds in rounds:
            if sequences not in believed:
                believed[sequences] = self.costs.seconds(sequences, [])
            yield seconds / believed[sequences]

    def _forget(self, now: float) -> None:
        """Drop old rounds, but keep the last `MIN_PLAIN` of all sizes."""
        for rounds in self._classes.values():
            while rounds and rounds[0][0] < now - RECENT_SECONDS:
                rounds.popleft()
