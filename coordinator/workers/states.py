"""States of the link to a worker, and the log of their changes."""

import logging
import time
from enum import StrEnum

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
