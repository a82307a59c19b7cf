"""Interprets the answers of a starting server, and limits the wait. Shared by both clients."""

import time
from collections.abc import Callable

from specpool.client.failures import is_permanent
from specpool.client.retries import TRANSIENT
from specpool.errors import NotReadyError, RequestError
from specpool.v1 import generation_pb2 as pb

POLL_SECONDS = 0.2
# The server queries its workers before it answers, and they may be busy.
ANSWER_SECONDS = 10.0

ProgressCallback = Callable[[str], None]


class Readiness:
    """Follows the startup of a server. The timeout restarts whenever the server reports that it is loading."""

    def __init__(self, patience: float, on_progress: ProgressCallback | None) -> None:
        """`patience`: timeout in seconds."""
        self._patience, self._on_progress = patience, on_progress
        self._shown = ""
        self._alive_at = time.monotonic()

    @property
    def answer_seconds(self) -> float:
        """Timeout of the next query."""
        return min(ANSWER_SECONDS, max(POLL_SECONDS, self._alive_at + self._patience - time.monotonic()))

    def is_ready(self, info: pb.GetServerInfoResponse) -> bool:
        """Return whether the server can generate. Raises NotReadyError if it never will, or after too long."""
        target = info.target
        if target.state == "ready":
            return True
        if target.state in ("failed", "refused"):
            raise NotReadyError(f"the target worker cannot start: {target.reason}")
        if target.state == "loading":
            self._alive_at = time.monotonic()
            self._show(target.reason)
        else:
            self._show("waiting for the target worker")
        if self._is_over:
            raise NotReadyError(f"the target worker is {target.state}: {target.reason}")
        return False

    def unanswered(self, error: RequestError) -> None:
        """Record a failed query. Raises the error if it is final, or after too long."""
        if is_permanent(error) or not isinstance(error, TRANSIENT) or self._is_over:
            raise error
        self._show("no answer")

    @property
    def _is_over(self) -> bool:
        return time.monotonic() >= self._alive_at + self._patience

    def _show(self, text: str) -> None:
        if text != self._shown and self._on_progress is not None:
            self._on_progress(text)
        self._shown = text
