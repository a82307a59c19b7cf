"""Cost model of a round: seconds of a pass by rows. Workers measure it at startup; every round corrects it. Pure."""

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise

# Recent rounds that count towards times that follow the machine's load. A new observation weighs 1 / RECENT or more.
RECENT = 15
# Minimum weight of a new observation of a time that hardly changes, relative to others.
WEIGHT = 0.02
# Maximum factor between an observation and its estimate: one stalled round changes little.
MAX_RISE = 4.0
# Maximum growth of the time per row. The first row of a kernel tile costs as much as several later rows.
MAX_GROWTH = 1.25
# Maximum time of a pass, and the inverse of its minimum: ratios stay finite.
MAX_SECONDS = 1e6
# Default seconds by rows, for workers without measurements.
UNKNOWN_VERIFY = {1: 0.02, 64: 0.04, 1024: 0.345}
UNKNOWN_DRAFT = {rows: seconds / 10 for rows, seconds in UNKNOWN_VERIFY.items()}


class StepTimes:
    """Seconds by number of rows. Interpolates between measured points and extrapolates from the last two.

    A worker splits more than `max_rows` rows into full passes and one pass with the rest.
    """

    def __init__(
        self, points: Mapping[int, float], cached: float = 0, per_cached: float = 0.0, max_rows: int = 0
    ) -> None:
        """`points`: seconds by rows, at least two, measured with `cached` positions per sequence.

        `per_cached`: extra seconds of a row per additional cached position. `max_rows`: rows of a pass; 0: unlimited.
        """
        assert len(points) > 1
        self.cached = cached
        """Current mean number of cached positions per sequence."""
        self.max_rows = max_rows
        self._measured_at, self._per_cached = cached, max(0.0, per_cached)
        self._rows = sorted(points)
        self._seconds = [_bounded(points[rows]) for rows in self._rows]
        self._observed = 0
        self._seen = [1.0] * len(points)
        """Observations of each point: 1 for a measured point, 0 for an extrapolated one."""
        self._keep_plausible()

    @classmethod
    def in_parallel(cls, workers: Sequence["StepTimes"], share: float = 1.0) -> "StepTimes":
        """Combine the times of workers that share the rows of each pass equally. The slowest worker counts.

        `share`: fraction of a pass's rows that these workers run. The other rows are ignored.
        """
        count, max_rows = len(workers) / share, [times.max_rows for times in workers if times.max_rows]
        return cls(
            {round(count * rows): max(times._line(rows) for times in workers) for rows in workers[0]._rows},
            max(times._measured_at for times in workers),
            max(times._per_cached for times in workers) / count,
            round(count * min(max_rows, default=0)),
        )

    def __call__(self, rows: float) -> float:
        """Seconds of this number of rows; 0 without rows."""
        if rows <= 0:
            return 0.0
        return sum(count * self._line(part) for part, count in self._passes(rows)) + self._extra(rows)

    @property
    def points(self) -> dict[int, float]:
        """Current estimates of one pass, in seconds by rows."""
        return dict(zip(self._rows, self._seconds, strict=True))

    def observe(self, rows: int, seconds: float) -> None:
        """Learn from a round with this number of rows."""
        self.observe_steps([rows], seconds)

    def observe_steps(self, steps: Sequence[int], seconds: float) -> None:
        """Learn from the total time of several steps, given their numbers of rows.

        First all points are scaled, since a slower worker is slower at every size. Moving single points would distort
        the cost of one more row. Extrapolated points do not affect the scale. Then each contributing point moves in
        proportion to its share of the time.
        """
        steps = [rows for rows in steps if rows > 0]
        if not steps or not 0 < seconds < math.inf:
            return
        parts = self._parts(steps)
        expected = sum(parts.values())
        error = _bounded(seconds) / (expected + sum(map(self._extra, steps)))
        known = sum(part * min(1.0, self._seen[at]) for at, part in parts.items()) / expected
        weight = known * max(1 / RECENT, 1 / (1 + self._observed))
        self._observed += 1
        scale, error = error**weight, error ** (1 - weight)
        self._seconds = [_bounded(point * scale) for point in self._seconds]
        squares = sum(part**2 for part in parts.values()) / expected
        for at, part in parts.items():
            weight = max(WEIGHT, 1 / (1 + self._seen[at])) * part / squares
            self._seconds[at] = _bounded(self._seconds[at] * error**weight)
            self._seen[at] += part / expected
        self._keep_plausible()

    def _passes(self, rows: float) -> list[tuple[float, int]]:
        """The passes for these rows, as (rows of a pass, number of such passes)."""
        if not self.max_rows or rows <= self.max_rows:
            return [(rows, 1)]
        full, rest = divmod(rows, self.max_rows)
        return [(self.max_rows, int(full)), *([(rest, 1)] if rest else [])]

    def _parts(self, steps: Sequence[int]) -> dict[int, float]:
        """Seconds that each point contributes to these steps, by index. Extrapolate points as needed."""
        parts: dict[int, float] = {}
        for rows, count in chain.from_iterable(map(self._passes, steps)):
            self._extrapolate(rows)
            index, share = self._segment(rows)
            for at, part in ((index, 1 - share), (index + 1, share)):
                if part:
                    parts[at] = parts.get(at, 0.0) + count * part * self._seconds[at]
        return parts

    def _extrapolate(self, rows: float) -> None:
        """Append points on the last line until they cover a pass of this number of rows."""
        while (last := self._rows[-1]) < rows:
            following = min(2 * last, self.max_rows or 2 * last)
            self._seconds.append(_bounded(self._line(following)))
            self._rows.append(following)
            self._seen.append(0.0)

    def _line(self, rows: float) -> float:
        """Seconds of one pass, for sequences as long as during the measurement."""
        index, share = self._segment(rows)
        return self._seconds[index] * (1 - share) + self._seconds[index + 1] * share

    def _extra(self, rows: float) -> float:
        """Extra seconds for sequences longer than during the measurement."""
        return rows * self._per_cached * max(0.0, self.cached - self._measured_at)

    def _keep_plausible(self) -> None:
        """Correct points so that more rows never take less time, nor much more time per row.

        Where points contradict each other, the one with the most observations wins.
        """
        points = pairwise(zip(self._rows, self._seconds, strict=True))
        if all(before <= after <= before * rows / fewer * MAX_GROWTH for (fewer, before), (rows, after) in points):
            return
        kept: list[int] = []
        for at in sorted(range(len(self._rows)), key=lambda at: -self._seen[at]):
            bounds = [self._bounds(at, i) for i in kept]
            low = max((low for low, _ in bounds), default=1 / MAX_SECONDS)
            high = min((high for _, high in bounds), default=MAX_SECONDS)
            self._seconds[at] = min(max(low, self._seconds[at]), high)
            kept.append(at)

    def _bounds(self, at: int, known: int) -> tuple[float, float]:
        """Minimum and maximum plausible seconds of point `at`, given point `known`."""
        seconds, ratio = self._seconds[known], self._rows[at] / self._rows[known]
        return (seconds, seconds * ratio * MAX_GROWTH) if ratio > 1 else (seconds * ratio / MAX_GROWTH, seconds)

    def _segment(self, rows: float) -> tuple[int, float]:
        """Index of the point below, and the fraction of the way to the next point. Above 1 beyond the last."""
        index = min(max(0, bisect_right(self._rows, rows) - 1), len(self._rows) - 2)
        first, second = self._rows[index], self._rows[index + 1]
        return index, max(0.0, (rows - first) / (second - first))


def _bounded(seconds: float) -> float:
    return min(MAX_SECONDS, max(1 / MAX_SECONDS, seconds))


@dataclass(frozen=True)
class Timed:
    """Seconds of a call to a worker: in total, in the model, in realignment, and in the draft that it carries."""

    elapsed: float = 0.0
    forward: float = 0.0
    realign: float = 0.0
    draft: float = 0.0
    draft_rows: tuple[int, ...] = ()
    """Rows of each pass of the carried draft. Empty if the draft only caught up."""
    waited: float = 0.0
    """Further seconds that the round waited for other drafts."""

    @property
    def wire(self) -> float:
        """Time outside the worker's own measurements."""
        return self.elapsed - self.forward - self.realign - self.draft


@dataclass
class RoundCosts:
    """Cost of a round, by component."""

    draft: StepTimes
    """A draft step, by participating sequences."""
    verify: StepTimes
    """A verification, by rows: one per sequence, and one per draft token."""
    exchange: float
    """Seconds of a round trip to a worker, without the pass."""
    plain_exchange: float | None = None
    """Seconds between the passes of two rounds that call no draft worker, whose messages may overlap with passes. None:
    as `exchange`."""
    scheduling: float = 0.0
    """Seconds that the coordinator itself takes in a round with drafts."""
    ahead_exchange: float | None = None
    """Seconds from the result of a verification until the branches of the next one arrive, excluding the draft worker's
    passes. None if the target worker cannot select branches."""
    has_own_draft: bool = False
    """Whether the target worker drafts for the next round before it answers, so that drafts take no messages."""

    def observe_exchange(self, seconds: float) -> None:
        """Learn from a call, of which `seconds` are outside the worker's own measurements."""
        self.exchange = _learned(self.exchange, seconds)

    def observe_plain(self, waited: float) -> None:
        """Learn how long the target waits between rounds that call no draft worker."""
        before = self.exchange if self.plain_exchange is None else self.plain_exchange
        self.plain_exchange = _learned(before, waited, max(before, self.exchange))

    def observe_ahead(self, waited: float) -> None:
        """Learn how long the branches of a round take, excluding the draft worker's passes."""
        if self.ahead_exchange is not None:
            self.ahead_exchange = _learned(self.ahead_exchange, waited, self.ahead_exchange)

    def observe_scheduling(self, seconds: float) -> None:
        """Learn how long the coordinator takes."""
        self.scheduling = _learned(self.scheduling, seconds, self.exchange)

    def seconds(self, sequences: int, drafting: list[int], num_lookup_tokens: int = 0) -> float:
        """Seconds of a round of `sequences` sequences, of which `drafting[j]` take part in draft step j.

        `num_lookup_tokens`: draft tokens of prompt lookup, which take no draft step.
        """
        drafted = sum(self.draft(count) for count in drafting if count)
        return drafted + self.verify(sequences + sum(drafting) + num_lookup_tokens) + self._waiting(any(drafting))

    def _waiting(self, is_drafted: bool) -> float:
        """Seconds of a round in which no model runs."""
        if is_drafted and not self.has_own_draft:
            return 2 * self.exchange + self.scheduling
        return self.exchange + self.scheduling if self.plain_exchange is None else self.plain_exchange


def _learned(estimate: float, seconds: float, scale: float = math.inf) -> float:
    """An estimate after an observation, which counts up to `MAX_RISE` times the scale."""
    return estimate + (min(max(0.0, seconds), MAX_RISE * scale) - estimate) / RECENT
