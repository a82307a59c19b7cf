"""HTTP connections with timeouts that uvicorn lacks, and errors in OpenAI's format for invalid HTTP."""

import asyncio
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from specpool.openai.errors import ApiError

HEAD_SECONDS = 10.0
UNREAD_BYTES = 16 * 2**10
"""Bytes of a next request that are read before the answer to the current one has ended."""


class Protocol(H11Protocol):
    """Closes a connection if a request's head, or the rest of a refused request, takes longer than `HEAD_SECONDS`.

    Closes connections above uvicorn's `limit_concurrency` at once.
    """

    _head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        if self.limit_concurrency is not None and len(self.connections) >= self.limit_concurrency:
            self.transport.abort()
        else:
            self._expect_head()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._check_head()
        # Bytes of a next request stop uvicorn's reading, and the end of the connection would not be noticed.
        if self.conn.their_state is h11.DONE and len(self.conn.trailing_data[0]) < UNREAD_BYTES:
            self.flow.resume_reading()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._check_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._end_timer()
        super().connection_lost(exc)

    def send_400_response(self, msg: str) -> None:
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):  # otherwise a response has begun
            body = ApiError(400, msg).body()
            headers = {"content-type": "application/json", "content-length": str(len(body)), "connection": "close"}
            answer = h11.Response(status_code=400, headers=[*headers.items()], reason=b"Bad Request")
            for event in (answer, h11.Data(data=body), h11.EndOfMessage()):
                self.transport.write(self.conn.send(event) or b"")
            if self.cycle is not None:
                self.cycle.disconnected = True
        self.transport.close()

    def _check_head(self) -> None:
        is_between = self.conn.their_state is h11.IDLE
        is_answering = self.cycle is not None and not self.cycle.response_complete
        if is_answering and not is_between:
            self._end_timer()
        elif self._head_timer is None and (self.conn.trailing_data[0] or not is_between):
            self._expect_head()

    def _expect_head(self) -> None:
        self._head_timer = asyncio.get_running_loop().call_later(HEAD_SECONDS, self.transport.close)

    def _end_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None
