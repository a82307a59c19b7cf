"""What a round costs: seconds of a worker's pass by its rows, measured at start and corrected by every round. Pure."""

from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass

# How fast what rounds take replaces what was measured before: for all numbers of rows alike, and for those near by.
SCALED_PER_ROUND, MOVED_PER_ROUND = 0.1, 0.02


class StepTimes:
    """Seconds of a pass: straight lines between points, and beyond the last one the slope that leads to it."""

    def __init__(self, points: Mapping[int, float]) -> None:
        """Seconds by rows, for at least two numbers of rows."""
        assert len(points) > 1
        self._rows = sorted(points)
        self._seconds = [points[rows] for rows in self._rows]

    def __call__(self, rows: float) -> float:
        """Seconds of a pass of so many rows; none takes no time."""
        if rows <= 0:
            return 0.0
        left, share = self._place(rows)
        return max(0.0, self._seconds[left] * (1 - share) + self._seconds[left + 1] * share)

    def observe(self, rows: int, seconds: float) -> None:
        """Takes in what a pass took.

        All points move together first: a worker that is slower than it was is slower for every number of rows, and
        points that moved alone would make a row more seem dear or cheap. Then those beside it, the nearer one more.
        """
        believed = self(rows)
        if believed > 0:
            scale = (seconds / believed) ** SCALED_PER_ROUND
            self._seconds = [point * scale for point in self._seconds]
        left, share = self._place(rows)
        share = min(1.0, share)
        error = MOVED_PER_ROUND * (seconds - self(rows)) / ((1 - share) ** 2 + share**2)
        self._seconds[left] = max(0.0, self._seconds[left] + error * (1 - share))
        self._seconds[left + 1] = max(0.0, self._seconds[left + 1] + error * share)

    @property
    def points(self) -> dict[int, float]:
        """Seconds by rows as they are believed now."""
        return dict(zip(self._rows, self._seconds, strict=True))

    def _place(self, rows: float) -> tuple[int, float]:
        """The point to the left, and how far to the next one it is: beyond 1 behind the last one."""
        left = min(max(0, bisect_right(self._rows, rows) - 1), len(self._rows) - 2)
        first, second = self._rows[left], self._rows[left + 1]
        return left, max(0.0, (rows - first) / (second - first))


@dataclass
class RoundCosts:
    """The parts of a round's time."""

    draft: StepTimes
    """Of one draft step, by the sequences that take part in it."""
    verify: StepTimes
    """By tokens verified: one for each sequence, and one for each draft token."""
    exchange: float
    """Seconds of a message to a worker and its answer, without the pass."""

    def seconds(self, sequences: int, drafting: list[int]) -> float:
        """Of a round of so many sequences, of which `drafting[j]` take part in draft step j."""
        drafted = sum(self.draft(count) for count in drafting if count)
        exchanges = 2 if any(drafting) else 1
        return drafted + self.verify(sequences + sum(drafting)) + exchanges * self.exchange
