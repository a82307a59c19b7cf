"""Costs of a round: seconds of a worker's passes by rows, measured at start and corrected by every round. Pure."""

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise

# Weights of a round's time against what was believed before: in the scale of all points, and in the points near by.
# The first rounds count for more, since what a busy machine measured at its start may be far off.
SCALED_PER_ROUND, MOVED_PER_ROUND = 0.1, 0.02
# How much longer each row may take where there are more of them: the first row of another tile of a kernel costs as
# much as several later ones.
STEP = 1.25
# Shortest and longest time believed of a pass, so that ratios of times stay finite.
LEAST_SECONDS, MOST_SECONDS = 1e-6, 1e6
# Seconds by rows, believed of workers that have not measured themselves.
UNKNOWN_VERIFY, UNKNOWN_DRAFT = {1: 0.02, 64: 0.04, 1024: 0.345}, {1: 0.002, 64: 0.004, 1024: 0.0345}


class StepTimes:
    """Seconds of a number of rows: straight lines between measured points, the last of which goes on beyond them.

    A worker cuts more rows than `max_rows` into several passes: full ones, and one of the remaining rows.
    """

    def __init__(
        self, points: Mapping[int, float], cached: float = 0, per_cached: float = 0.0, max_rows: int = 0
    ) -> None:
        """`points`: seconds by rows, for at least two numbers of rows, where sequences have `cached` positions.
        `per_cached`: extra seconds of each row per additional cached position. `max_rows`: greatest number of rows of
        one pass; 0: unlimited.
        """
        assert len(points) > 1
        self.cached = cached
        """Mean number of positions that sequences have cached now."""
        self.max_rows = max_rows
        self._measured_at, self._per_cached = cached, max(0.0, per_cached)
        self._rows = sorted(points)
        self._seconds = [_bounded(points[rows]) for rows in self._rows]
        self._observed = 0
        self._seen = [1.0] * len(points)
        """Observations of each point. Its measurement counts as one; a point that was only extrapolated has none."""
        self._keep_plausible()

    def __call__(self, rows: float) -> float:
        """Seconds of this number of rows; 0 without rows."""
        if rows <= 0:
            return 0.0
        return sum(count * self._line(part) for part, count in self._passes(rows)) + self._of_longer(rows)

    @property
    def points(self) -> dict[int, float]:
        """Seconds by rows of one pass, as believed now."""
        return dict(zip(self._rows, self._seconds, strict=True))

    def observe(self, rows: int, seconds: float) -> None:
        """Takes in the time of a round with this number of rows."""
        self.observe_steps([rows], seconds)

    def observe_steps(self, steps: Sequence[int], seconds: float) -> None:
        """Takes in the time that steps with these numbers of rows took together.

        All points move together first: a worker that has become slower is slower for every number of rows, and points
        that moved alone would distort the cost of one more row. An error of extrapolated points does not count here: it
        says nothing about the worker. Then the points that make up the time move, in proportion to their part of it.
        """
        steps = [rows for rows in steps if rows > 0]
        if not steps or not 0 < seconds < math.inf:
            return
        parts = self._parts(steps)
        believed = sum(parts.values())
        error = _bounded(seconds) / (believed + sum(map(self._of_longer, steps)))
        known = sum(part * min(1.0, self._seen[at]) for at, part in parts.items()) / believed
        scaled = known * max(SCALED_PER_ROUND, 1 / (1 + self._observed))
        self._observed += 1
        scale, error = error**scaled, error ** (1 - scaled)
        self._seconds = [_bounded(point * scale) for point in self._seconds]
        squares = sum(part**2 for part in parts.values()) / believed
        for at, part in parts.items():
            weight = max(MOVED_PER_ROUND, 1 / (1 + self._seen[at])) * part / squares
            self._seconds[at] = _bounded(self._seconds[at] * error**weight)
            self._seen[at] += part / believed
        self._keep_plausible()

    def _passes(self, rows: float) -> list[tuple[float, int]]:
        """The passes that rows are cut into: the rows of a pass, and the number of such passes."""
        if not self.max_rows or rows <= self.max_rows:
            return [(rows, 1)]
        full, rest = divmod(rows, self.max_rows)
        return [(self.max_rows, int(full)), *([(rest, 1)] if rest else [])]

    def _parts(self, steps: Sequence[int]) -> dict[int, float]:
        """The part of each point in the seconds of these steps, by index. Extrapolates points as far as needed."""
        parts: dict[int, float] = {}
        for rows, count in chain.from_iterable(map(self._passes, steps)):
            self._extrapolate(rows)
            left, share = self._segment(rows)
            for at, part in ((left, 1 - share), (left + 1, share)):
                if part:
                    parts[at] = parts.get(at, 0.0) + count * part * self._seconds[at]
        return parts

    def _extrapolate(self, rows: float) -> None:
        """Adds points on the line beyond the last one, until it reaches a pass of this number of rows."""
        while (last := self._rows[-1]) < rows:
            further = min(2 * last, self.max_rows or 2 * last)
            self._seconds.append(_bounded(self._line(further)))
            self._rows.append(further)
            self._seen.append(0.0)

    def _line(self, rows: float) -> float:
        """Seconds of one pass, for sequences as long as when the points were measured."""
        left, share = self._segment(rows)
        return self._seconds[left] * (1 - share) + self._seconds[left + 1] * share

    def _of_longer(self, rows: float) -> float:
        """Extra seconds because sequences are longer than when the points were measured."""
        return rows * self._per_cached * max(0.0, self.cached - self._measured_at)

    def _keep_plausible(self) -> None:
        """Corrects points so that more rows never take less time, nor much more time per row.

        Of points that contradict each other, the one that was observed most often stays.
        """
        points = pairwise(zip(self._rows, self._seconds, strict=True))
        if all(before <= after <= before * rows / fewer * STEP for (fewer, before), (rows, after) in points):
            return
        kept: list[int] = []
        for at in sorted(range(len(self._rows)), key=lambda at: -self._seen[at]):
            bounds = [self._bounds(at, i) for i in kept]
            least = max((low for low, _ in bounds), default=LEAST_SECONDS)
            most = min((high for _, high in bounds), default=MOST_SECONDS)
            self._seconds[at] = min(max(least, self._seconds[at]), most)
            kept.append(at)

    def _bounds(self, at: int, known: int) -> tuple[float, float]:
        """Least and most plausible seconds of a point, by another one."""
        seconds, ratio = self._seconds[known], self._rows[at] / self._rows[known]
        return (seconds, seconds * ratio * STEP) if ratio > 1 else (seconds * ratio / STEP, seconds)

    def _segment(self, rows: float) -> tuple[int, float]:
        """The index of the point to the left, and the share of the way to the next point: above 1 beyond the last."""
        left = min(max(0, bisect_right(self._rows, rows) - 1), len(self._rows) - 2)
        first, second = self._rows[left], self._rows[left + 1]
        return left, max(0.0, (rows - first) / (second - first))


def _bounded(seconds: float) -> float:
    return min(MOST_SECONDS, max(LEAST_SECONDS, seconds))


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
