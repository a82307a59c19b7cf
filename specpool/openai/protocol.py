"""HTTP connections with a time limit on the heads of requests, and probes beyond the limit on their number."""

import asyncio
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

HEAD_SECONDS = 10.0
PROBED = ("/health", "/metrics")
"""Answered even if clients hold all connections: a failing probe would restart the server, and cut their requests."""


class Protocol(H11Protocol):
    """Closes a connection if the head of a request takes longer than `HEAD_SECONDS`."""

    _head_timer: asyncio.TimerHandle | None = None
    _limit: int | None = None

    @property
    def limit_concurrency(self) -> int | None:
        """The limit for the request whose head was just read."""
        return None if self.scope["path"] in PROBED else self._limit

    @limit_concurrency.setter
    def limit_concurrency(self, limit: int | None) -> None:
        self._limit = limit

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._expect_head()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._check_head()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._check_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._end_timer()
        super().connection_lost(exc)

    def _check_head(self) -> None:
        if self.conn.their_state is not h11.IDLE:
            self._end_timer()
        elif self._head_timer is None and self.conn.trailing_data[0]:
            self._expect_head()

    def _expect_head(self) -> None:
        self._head_timer = asyncio.get_running_loop().call_later(HEAD_SECONDS, self.transport.close)

    def _end_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None
