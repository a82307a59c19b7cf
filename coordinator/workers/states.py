"""State of the link to a worker: its log, the backoff after failures, and queries whose result is reused."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Generic, TypeVar

log = logging.getLogger(__name__)

LISTEN_SECONDS = 10.0
"""Time for a worker to begin to listen. Until then, processes that start together find each other without warnings."""


class LinkState(StrEnum):
    """State of a link, with its name in the public API."""

    CONNECTING = "connecting"
    LOADING = "loading"
    READY = "ready"
    BACKOFF = "resting"
    REFUSED = "refused"
    FAILED = "failed"


_LEVELS = {LinkState.READY: logging.INFO, LinkState.LOADING: logging.DEBUG}  # workers log their phases themselves


class StateLog:
    """Logs each state of a link once, as long as it lasts."""

    def __init__(self, worker: str) -> None:
        """`worker`: its role and address."""
        self._worker = worker
        self._logged: tuple[LinkState, str] | None = None
        self._patient_until = time.monotonic() + LISTEN_SECONDS

    def show(self, state: LinkState, reason: str, level: int | None = None) -> None:
        """Log the current state if it is new. `level`: of this state, instead of the usual one."""
        if state is not LinkState.CONNECTING:
            self._patient_until = 0.0
        elif time.monotonic() < self._patient_until:
            return
        if (state, reason) == self._logged:
            return
        self._logged = state, reason
        verb = "has" if state is LinkState.FAILED else "is"
        because = f": {reason}" if reason else ""
        log.log(level or _LEVELS.get(state, logging.WARNING), "%s %s %s%s", self._worker, verb, state, because)


@dataclass
class Backoff:
    """Doubles the pause before a worker is tried again, until the worker has been up for long enough.

    Like a half-open circuit breaker. Pure.
    """

    first: float
    """Seconds of the first pause."""
    second: float
    """Seconds of the second pause. Later ones double."""
    maximum: float
    reset_after: float
    """Uptime that resets the backoff, as a multiple of the last pause.

    0: one success is enough, so that a worker that fails every second round never pauses longer.
    """

    _failures: int = 0
    _pause: float = 0.0
    _retried_at: float = 0.0
    _succeeded: bool = False

    def failed(self, now: float) -> float:
        """Record a failure at `now`, in seconds of a monotonic clock. Return the seconds to pause."""
        uptime = now - self._retried_at
        if self._succeeded and uptime >= self.reset_after * max(self._pause, self.first, self.second):
            self._failures = 0
        self._pause = self.first if not self._failures else min(self.maximum, max(self.second, 2 * self._pause))
        self._failures += 1
        self._retried_at, self._succeeded = now + self._pause, False
        return self._pause

    def succeeded(self) -> None:
        self._succeeded = True


R = TypeVar("R")

RECENT_SECONDS = 0.1
"""Time for which a result is reused."""


class Recent(Generic[R]):
    """A query that concurrent callers share. Later callers reuse its result for `RECENT_SECONDS`."""

    def __init__(self, query: Callable[[], Awaitable[R]], is_reused: bool = True) -> None:
        """`is_reused`: whether later callers reuse the result."""
        self._query, self._is_reused = query, is_reused
        self._querying: asyncio.Future[R] | None = None
        self._ends = 0.0

    async def get(self) -> R:
        """Return the result. Raises the error of the query."""
        if self._querying is None or (self._querying.done() and time.monotonic() >= self._ends):
            self._querying = asyncio.ensure_future(self._ask())
        return await asyncio.shield(self._querying)  # other callers may need it

    async def _ask(self) -> R:
        try:
            return await self._query()
        finally:
            self._ends = time.monotonic() + (RECENT_SECONDS if self._is_reused else 0.0)
