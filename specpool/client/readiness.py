"""Waiting for a server that starts: what its answers mean, and how long to wait. Shared by both clients."""

import time
from collections.abc import Callable

import grpc

from specpool.client.retries import TRANSIENT
from specpool.v1 import generation_pb2 as pb

POLL_SECONDS = 0.2
# The server queries its workers before it answers, and they may be busy.
ANSWER_SECONDS = 10.0

ProgressCallback = Callable[[str], None]


class NotReadyError(Exception):
    """The server failed to start, or was not ready in time. The message says why."""


class Readiness:
    """Follows the startup of a server. Patience begins anew whenever the server says that its model is loading."""

    def __init__(self, patience: float, on_progress: ProgressCallback | None) -> None:
        """`patience` in seconds."""
        self._patience, self._on_progress = patience, on_progress
        self._shown = ""
        self._alive_at = time.monotonic()

    @property
    def answer_seconds(self) -> float:
        """Timeout of the next query."""
        return min(ANSWER_SECONDS, max(POLL_SECONDS, self._alive_at + self._patience - time.monotonic()))

    def is_ready(self, info: pb.GetServerInfoResponse) -> bool:
        """Whether the server can generate. NotReadyError if it never will, or after too long."""
        target = info.target
        if target.state == "ready":
            return True
        if target.state in ("failed", "refused"):
            raise NotReadyError(f"the target worker cannot start: {target.reason}")
        if target.state == "loading":
            self._alive_at = time.monotonic()
            self._show(target.reason)
        else:
            self._show("the server waits for its target worker")
        if self._is_over:
            raise NotReadyError(f"the target worker is {target.state}: {target.reason}")
        return False

    def unanswered(self, error: grpc.RpcError) -> None:
        """Record a failed query. Raises the error if it is final, or after too long."""
        if error.code() not in TRANSIENT or self._is_over:
            raise error
        self._show("no answer")

    @property
    def _is_over(self) -> bool:
        return time.monotonic() >= self._alive_at + self._patience

    def _show(self, text: str) -> None:
        if text != self._shown and self._on_progress is not None:
            self._on_progress(text)
        self._shown = text
