"""What a round costs: seconds of a worker's pass by its rows, measured at start and corrected by every round. Pure."""

from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass

# How fast what rounds take replaces what was believed before: for all numbers of rows alike, and for those near by. The
# first rounds count for more, since what a busy machine measured at its start may be far off.
SCALED_PER_ROUND, MOVED_PER_ROUND = 0.1, 0.02
# No pass takes less: what is compared with it and divided by it stays a number.
LEAST_SECONDS = 1e-6
# Believed of workers that have not measured themselves.
UNKNOWN_VERIFY, UNKNOWN_DRAFT = {1: 0.02, 64: 0.04}, {1: 0.002, 64: 0.004}


class StepTimes:
    """Seconds of a pass: straight lines between points, and beyond the last one the slope that leads to it."""

    def __init__(self, points: Mapping[int, float], cached: float = 0, per_cached: float = 0.0) -> None:
        """Seconds by rows, for at least two numbers of rows, where sequences have `cached` positions.

        `per_cached`: what each row takes more for every position more.
        """
        assert len(points) > 1
        self.cached = cached
        """Positions that sequences have cached now, on an average."""
        self._measured_at, self._per_cached = cached, per_cached
        self._rows = sorted(points)
        self._seconds = [max(LEAST_SECONDS, points[rows]) for rows in self._rows]
        self._observed, self._observed_at = 0, [0] * len(points)
        self._keep_plausible()

    def __call__(self, rows: float) -> float:
        """Seconds of a pass of so many rows; none takes no time."""
        if rows <= 0:
            return 0.0
        return max(LEAST_SECONDS, self._line(rows) + self._of_longer(rows))

    def observe(self, rows: int, seconds: float) -> None:
        """Takes in what a pass took.

        All points move together first: a worker that is slower than it was is slower for every number of rows, and
        points that moved alone would make a row more seem dear or cheap. Then those beside it, the nearer one more.
        """
        seconds = max(LEAST_SECONDS, seconds - self._of_longer(rows))
        scale = (seconds / self._line(rows)) ** max(SCALED_PER_ROUND, 1 / (1 + self._observed))
        self._observed += 1
        self._seconds = [point * scale for point in self._seconds]
        left, share = self._segment(rows)
        share = min(1.0, share)
        error = (seconds - self._line(rows)) / ((1 - share) ** 2 + share**2)
        for at, part in ((left, 1 - share), (left + 1, share)):
            weight = max(MOVED_PER_ROUND, 1 / (2 + self._observed_at[at])) * part
            self._observed_at[at] += part > 0
            self._seconds[at] = max(LEAST_SECONDS, self._seconds[at] + weight * error)
        self._keep_plausible()

    def _line(self, rows: float) -> float:
        """Seconds of sequences as long as they were when they were measured."""
        left, share = self._segment(rows)
        return max(LEAST_SECONDS, self._seconds[left] * (1 - share) + self._seconds[left + 1] * share)

    def _of_longer(self, rows: float) -> float:
        """Seconds that so many rows take more than they did when they were measured."""
        return rows * self._per_cached * max(0.0, self.cached - self._measured_at)

    @property
    def points(self) -> dict[int, float]:
        """Seconds by rows as they are believed now."""
        return dict(zip(self._rows, self._seconds, strict=True))

    def _keep_plausible(self) -> None:
        """More rows never take less time, nor more of it per row: what was observed more often corrects the other."""
        for i in range(1, len(self._rows)):
            least, most = self._seconds[i - 1], self._seconds[i - 1] * self._rows[i] / self._rows[i - 1]
            if self._observed_at[i] > self._observed_at[i - 1]:
                self._seconds[i - 1] = min(max(least, self._seconds[i] * least / most), self._seconds[i])
            else:
                self._seconds[i] = min(max(least, self._seconds[i]), most)

    def _segment(self, rows: float) -> tuple[int, float]:
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

    def seconds(self, sequences: int, drafting: list[int], by_lookup: int = 0) -> float:
        """Seconds of a round of this number of sequences, of which `drafting[j]` take part in draft step j.

        `by_lookup`: draft tokens of prompt lookup, which are verified but cost no draft step.
        """
        drafted = sum(self.draft(count) for count in drafting if count)
        exchanges = 2 if any(drafting) else 1
        return drafted + self.verify(sequences + sum(drafting) + by_lookup) + exchanges * self.exchange
