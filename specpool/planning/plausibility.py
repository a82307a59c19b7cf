"""Finds measured pass times that contradict each other, and repeats those measurements. Pure: no clock."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from math import inf

TOLERANCE, TOLERANCE_PER_ROW = 0.25, 0.5
"""Tolerated excess of a pass over one of more rows, and per row over one of fewer rows."""
IGNORED_SECONDS = 0.0002
"""Ignore smaller differences: a message to a worker takes longer."""
REPEATS, MAX_REPEATS = 5, 12
"""Measured passes of each number of rows, normally and while times contradict each other. The fastest one counts."""
ALWAYS, ALWAYS_ROWS = 2, 64
"""Minimum number of measurements of passes of up to ALWAYS_ROWS rows, however long they take."""


MAX_NAMED = 3
"""Maximum number of contradictions in a message."""


class ImplausibleTimesError(Exception):
    """Measured times contradict each other; the message names them."""


@dataclass(frozen=True)
class Contradiction:
    """Two times that cannot both be true. Other load only slows passes down, so the longer one is wrong."""

    slow: int
    """Rows of the slow pass."""
    other: int
    """Rows of the pass that contradicts it."""
    factor: float
    """The slow pass took this many times longer than it could."""


def contradictions(step_seconds: Mapping[int, float]) -> list[Contradiction]:
    """Find passes that took longer than one of more rows, or much longer per row than one of fewer; worst first.

    `step_seconds`: seconds of a pass by its rows.
    """
    found = []
    for fewer, more in combinations(sorted(step_seconds), 2):
        short, long = step_seconds[fewer], step_seconds[more]
        for slow, other, seconds, limit in (
            (fewer, more, short, long * (1 + TOLERANCE)),
            (more, fewer, long, short * more / fewer * (1 + TOLERANCE_PER_ROW)),
        ):
            if seconds > limit + IGNORED_SECONDS:
                found.append(Contradiction(slow, other, seconds / limit if limit else inf))
    return sorted(found, key=lambda each: each.factor, reverse=True)


def check_times(name: str, step_seconds: Mapping[int, float]) -> None:
    """Raise ImplausibleTimesError if the times of this model contradict each other, naming the worst ones."""
    worst: dict[int, Contradiction] = {}
    for each in contradictions(step_seconds):
        worst.setdefault(each.slow, each)
    if worst:
        pairs = [(each.slow, each.other) for each in worst.values()][:MAX_NAMED]
        raise ImplausibleTimesError(f"{name}: {'; '.join(_compare(step_seconds, *pair) for pair in pairs)}")


def measure_times(
    seconds_of: Callable[[int], float],
    row_counts: Sequence[int],
    budget_seconds: float,
    report: Callable[[str], None] = lambda step: None,
) -> dict[int, float]:
    """Measure the seconds of a pass by its rows, each the fastest of several. Repeats contradictory measurements.

    `seconds_of`: run a pass of this many rows, and return its seconds. `row_counts`: ascending. `budget_seconds`: once
    all passes together have taken this long, only a minimum is still measured. `report`: takes a description of the
    next pass.
    """
    times: dict[int, float] = {}
    spent = 0.0
    for repeat in range(MAX_REPEATS):
        counts = row_counts if repeat < REPEATS else sorted({each.slow for each in contradictions(times)})
        for rows in counts:
            if spent < budget_seconds or (repeat < ALWAYS and rows <= ALWAYS_ROWS):
                report(f"rows: {rows}{', again' if repeat >= REPEATS else ''}")
                seconds = seconds_of(rows)
                times[rows] = min(seconds, times.get(rows, inf))
                spent += seconds
    return times


def _compare(step_seconds: Mapping[int, float], slow: int, other: int) -> str:
    times = (f"{rows} row{'s' * (rows > 1)} took {1000 * step_seconds[rows]:,.1f} ms" for rows in (slow, other))
    return ", but ".join(times)
