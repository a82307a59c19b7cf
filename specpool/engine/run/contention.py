"""Detects that other processes use the cores of the forward passes."""

import time
from bisect import bisect_left
from collections.abc import Callable, Mapping
from pathlib import Path

WINDOW_SECONDS = 5.0
"""Time of the passes that are judged together."""
SLOW, WAITED_SHARE = 3.0, 0.25
"""Report passes that take this many times their best time, while threads wait this share of the window for a core."""


class ContentionMonitor:
    """Compares passes with the best pass of as many rows, and with the time that threads waited for a core."""

    def __init__(
        self,
        step_seconds: Mapping[int, float],
        advice: str,
        waited: Callable[[], float | None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`step_seconds`: known seconds of a pass by its rows. `advice`: what to do. `waited`: as `seconds_waited`."""
        self._best, self._known, self._advice = dict(step_seconds), sorted(step_seconds.items()), advice
        self._waited = seconds_waited if waited is None else waited
        self._waited_before, self._clock, self._began = self._waited(), clock, clock()
        self._spent = self._expected = 0.0

    def add(self, rows: int, seconds: float, attention_seconds: float = 0.0) -> str | None:
        """Record a pass. At the end of a window, return a sentence if other processes slowed it down, else None.

        `attention_seconds`: known extra seconds, because its sequences are longer than those of `step_seconds`.
        """
        best = self._best[rows] = min(seconds, self._best.get(rows, self._expect(rows)))
        self._spent += seconds
        self._expected += best + attention_seconds
        if self._spent < WINDOW_SECONDS:
            return None
        spent, expected, before = self._spent, self._expected, self._waited_before
        self._spent = self._expected = 0.0
        self._waited_before = after = self._waited()
        began, self._began = self._began, self._clock()
        if before is None or after is None:
            return None
        found = contention(spent, expected, after - before, self._began - began)
        return None if found is None else f"{found}; {self._advice}"

    def _expect(self, rows: int) -> float:
        """Known seconds of the next larger pass."""
        index = bisect_left(self._known, (rows, 0.0))
        return self._known[index][1] if index < len(self._known) else float("inf")


def contention(spent: float, expected: float, waited: float, elapsed: float) -> str | None:
    """A sentence if passes that took `spent` seconds instead of `expected` waited for cores, else None.

    `waited`: seconds that the process's threads waited during the `elapsed` seconds of the window, summed over the
    threads. Threads also wait between passes, so a wait that is short for the window is no evidence.
    """
    if spent < SLOW * expected or waited < WAITED_SHARE * max(spent, elapsed):
        return None
    return (
        f"the CPU is shared with other processes: forward passes take {spent / expected:.1f} times their best time, "
        f"and their threads waited {waited:.1f} s for a core during {max(spent, elapsed):.1f} s"
    )


def seconds_waited(tasks: Path = Path("/proc/self/task")) -> float | None:
    """Seconds for which the threads of this process were runnable but had no core; None if the system does not tell."""
    nanoseconds = None
    for file in tasks.glob("*/schedstat"):
        try:
            nanoseconds = (nanoseconds or 0) + int(file.read_text().split()[1])
        except (OSError, IndexError, ValueError):  # the thread has ended
            continue
    return None if nanoseconds is None else nanoseconds / 1e9
