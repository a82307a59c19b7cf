"""Notices that the model thread hangs: its work has gone on for too long without the end of a forward pass."""

import asyncio
import logging
import time
from collections.abc import Callable

from specpool.worker.model_thread import ModelThread, WorkItem

log = logging.getLogger(__name__)

CHECKS = 10
"""Number of checks in the time that work may take."""


class Watchdog:
    """Watches the model thread from the event loop."""

    def __init__(
        self, thread: ModelThread, progress: Callable[[], int], seconds: float, on_change: Callable[[bool], None]
    ) -> None:
        """`progress`: a number that changes while the work gets on. `on_change`: called with True when the thread has
        been found to hang, and with False once it gets on."""
        self._thread, self._progress, self._on_change = thread, progress, on_change
        self._seconds = seconds
        self._seen: tuple[WorkItem | None, int] = (None, 0)
        self._stalled = 0.0
        self._checked = time.monotonic()
        self.hanging: str | None = None
        """What hangs, as a message for callers; None while nothing does."""

    async def watch(self) -> None:
        """Checks for ever."""
        while True:
            await asyncio.sleep(self._seconds / CHECKS)
            self.check(time.monotonic())

    def check(self, now: float) -> None:
        """Compares what runs at `now`, in seconds of a monotonic clock, with what ran at the last check."""
        # Time in which the whole process stood still does not count as a hang.
        elapsed = min(now - self._checked, 2 * self._seconds / CHECKS)
        self._checked = now
        seen = self._thread.running, self._progress()
        self._stalled = self._stalled + elapsed if seen == self._seen and seen[0] is not None else 0.0
        self._seen = seen
        if self.hanging is not None and not self._stalled:
            log.warning("the model thread gets on again")
            self.hanging = None
            self._on_change(False)
        elif self.hanging is None and seen[0] is not None and self._stalled > self._seconds:
            self.hanging = f"the model hangs: {seen[0].name} has made no progress for {self._stalled:.0f} s"
            running = now - seen[0].began
            log.error("%s, and has run for %.0f s; it is in %s", self.hanging, running, self._thread.stack())
            self._on_change(True)
