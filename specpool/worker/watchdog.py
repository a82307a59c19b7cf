"""Detects a hung model thread, which finishes no forward pass for too long."""

import asyncio
import logging
import time
from collections.abc import Callable

from specpool.worker.model_thread import ModelThread, WorkItem

log = logging.getLogger(__name__)

CHECKS = 10
"""Number of checks within the time limit."""


class Watchdog:
    """Watches the model thread from the event loop."""

    def __init__(
        self, thread: ModelThread, progress: Callable[[], int], seconds: float, on_change: Callable[[bool], None]
    ) -> None:
        """`progress`: a number that changes while work progresses. `on_change`: called with True when the thread hangs,
        and with False once work progresses again."""
        self._thread, self._progress, self._on_change = thread, progress, on_change
        self._seconds = seconds
        self._seen: tuple[WorkItem | None, int] = (None, 0)
        self._stalled = 0.0
        self._checked = time.monotonic()
        self.hanging: str | None = None
        """A message for callers while the thread hangs; otherwise None."""

    async def watch(self) -> None:
        """Check until cancelled."""
        while True:
            await asyncio.sleep(self._seconds / CHECKS)
            self.check(time.monotonic())

    def check(self, now: float) -> None:
        """Compare the work item and its progress with the last check. `now`: monotonic seconds."""
        # Do not count time in which the whole process was stopped.
        elapsed = min(now - self._checked, 2 * self._seconds / CHECKS)
        self._checked = now
        seen = self._thread.running, self._progress()
        self._stalled = self._stalled + elapsed if seen == self._seen and seen[0] is not None else 0.0
        self._seen = seen
        if self.hanging is not None and not self._stalled:
            log.warning("the model thread makes progress again")
            self.hanging = None
            self._on_change(False)
        elif self.hanging is None and seen[0] is not None and self._stalled > self._seconds:
            self.hanging = f"the model hangs: {seen[0].name} has made no progress for {self._stalled:.0f} s"
            running = now - seen[0].began
            log.error("%s, and has run for %.0f s; it is in %s", self.hanging, running, self._thread.stack())
            self._on_change(True)
