"""What a round costs: seconds of a worker's pass by its rows, measured at start and corrected by every round. Pure."""

from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass

# Weights of a round's time against what was believed before: in the scale of all points, and in the points near by.
# The first rounds count for more, since what a busy machine measured at its start may be far off.
SCALED_PER_ROUND, MOVED_PER_ROUND = 0.1, 0.02
# Shortest time believed of a pass, so that ratios of times stay finite.
LEAST_SECONDS = 1e-6
# Seconds by rows, believed of workers that have not measured themselves.
UNKNOWN_VERIFY, UNKNOWN_DRAFT = {1: 0.02, 64: 0.04}, {1: 0.002, 64: 0.004}


class StepTimes:
    """Seconds of a pass by rows: straight lines between measured points, the last of which goes on beyond them."""

    def __init__(self, points: Mapping[int, float], cached: float = 0, per_cached: float = 0.0) -> None:
        """`points`: seconds by rows, for at least two numbers of rows, where sequences have `cached` positions.
        `per_cached`: extra seconds of each row per additional cached position.
        """
        assert len(points) > 1
        self.cached = cached
        """Mean number of positions that sequences have cached now."""
        self._measured_at, self._per_cached = cached, per_cached
        self._rows = sorted(points)
        self._seconds = [max(LEAST_SECONDS, points[rows]) for rows in self._rows]
        self._observed, self._observed_at = 0, [0] * len(points)
        self._keep_plausible()

    def __call__(self, rows: float) -> float:
        """Seconds of a pass of this number of rows; 0 without rows."""
        if rows <= 0:
            return 0.0
        return max(LEAST_SECONDS, self._line(rows) + self._of_longer(rows))

    def observe(self, rows: int, seconds: float) -> None:
        """Takes in the time of a pass.

        All points move together first: a worker that has become slower is slower for every number of rows, and points
        that moved alone would distort the cost of one more row. Then the two points around move, the nearer one more.
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
        """Seconds for sequences as long as when the points were measured."""
        left, share = self._segment(rows)
        return max(LEAST_SECONDS, self._seconds[left] * (1 - share) + self._seconds[left + 1] * share)

    def _of_longer(self, rows: float) -> float:
        """Extra seconds because sequences are longer than when the points were measured."""
        return rows * self._per_cached * max(0.0, self.cached - self._measured_at)

    @property
    def points(self) -> dict[int, float]:
        """Seconds by rows, as believed now."""
        return dict(zip(self._rows, self._seconds, strict=True))

    def _keep_plausible(self) -> None:
        """Corrects points so that more rows never take less time, nor more time per row.

        Of two points that contradict each other, the one that was observed more often stays.
        """
        for i in range(1, len(self._rows)):
            least, most = self._seconds[i - 1], self._seconds[i - 1] * self._rows[i] / self._rows[i - 1]
            if self._observed_at[i] > self._observed_at[i - 1]:
                self._seconds[i - 1] = min(max(least, self._seconds[i] * least / most), self._seconds[i])
            else:
                self._seconds[i] = min(max(least, self._seconds[i]), most)

    def _segment(self, rows: float) -> tuple[int, float]:
        """The index of the point to the left, and the share of the way to the next point: above 1 beyond the last."""
        left = min(max(0, bisect_right(self._rows, rows) - 1), len(self._rows) - 2)
        first, second = self._rows[left], self._rows[left + 1]
        return left, max(0.0, (rows - first) / (second - first))


@dataclass
class RoundCosts:
    """The parts of a round's time."""

    draft: StepTimes
    """Seconds of one draft step, by the sequences that take part in it."""
    verify: StepTimes
    """Seconds of a verification, by its rows: one for each sequence, and one for each draft token."""
    exchange: float
    """Seconds of a message to a worker and its answer, without the pass."""

    def seconds(self, sequences: int, drafting: list[int], by_lookup: int = 0) -> float:
        """Seconds of a round of this number of sequences, of which `drafting[j]` take part in draft step j.

        `by_lookup`: draft tokens of prompt lookup, which are verified but cost no draft step.
        """
        drafted = sum(self.draft(count) for count in drafting if count)
        exchanges = 2 if any(drafting) else 1
        return drafted + self.verify(sequences + sum(drafting) + by_lookup) + exchanges * self.exchange
