"""Publishes the startup phases of a worker from the loading thread to calls on the event loop."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable

log = logging.getLogger(__name__)

MAX_FAILURE_CHARACTERS = 1000
"""Maximum length of an error. Libraries list thousands of tensors, but coordinators refuse large responses."""


class Startup:
    """Current phase of a startup, or why it failed. For the event loop, except the function that `reporter` returns."""

    def __init__(self) -> None:
        self._phase, self._failure = "starting", ""
        self._is_over = False
        self._changed = asyncio.Event()
        """Set on the next change, then replaced."""

    def reporter(self) -> Callable[[str], None]:
        """Return a function that logs and publishes a new phase, for any thread."""
        loop = asyncio.get_running_loop()

        def report(phase: str) -> None:
            log.info("%s", phase)
            loop.call_soon_threadsafe(self._enter, phase)

        return report

    def _enter(self, phase: str) -> None:
        self._phase = phase
        self._wake()

    def end(self, failure: str = "") -> None:
        """End every watch, after it has sent the failure, if any. Only the first call counts."""
        if not self._is_over:
            self._failure, self._is_over = failure[:MAX_FAILURE_CHARACTERS], True
            self._wake()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def watch(self) -> AsyncIterator[tuple[str, str]]:
        """Yield the phase and the failure now and after each change. Slow readers may miss phases, but no failure."""
        sent = None
        while True:
            changed, current = self._changed, (self._phase, self._failure)
            if current != sent and (self._failure or not self._is_over):
                yield current
                sent = current
            elif self._is_over:
                return
            else:
                await changed.wait()
