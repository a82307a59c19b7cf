"""HTTP connections with timeouts that uvicorn lacks, and errors in OpenAI's format for invalid HTTP."""

import asyncio
import re
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from specpool.openai.errors import ApiError

HEAD_END = re.compile(rb"\n\r?\n")
HEAD_SECONDS = 10.0
UNREAD_BYTES = 16 * 2**10
"""Maximum bytes of a pipelined request to buffer before the current one is answered."""


class Protocol(H11Protocol):
    """Closes a connection if a request's head, or the rest of a refused request, takes longer than `HEAD_SECONDS`.

    Above uvicorn's `limit_concurrency`, each new connection closes an idle one.
    """

    _head_timer: asyncio.TimerHandle | None = None

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        # The application refuses requests in OpenAI's form.
        self._max_connections, self.limit_concurrency = self.limit_concurrency, None

    @property
    def is_answering(self) -> bool:
        """Whether a request is being answered."""
        return self.cycle is not None and not self.cycle.response_complete

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        if self._max_connections is not None and len(self.connections) > self._max_connections:
            others = (each for each in self.connections if isinstance(each, Protocol) and each is not self)
            if (waiting := next((each for each in others if not each.is_answering), None)) is not None:
                waiting.transport.abort()
        self._expect_head()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._check_head()
        # uvicorn stops reading at a pipelined request, and would then miss a disconnect.
        if self.conn.their_state is h11.DONE and len(self.conn.trailing_data[0]) < UNREAD_BYTES:
            self.flow.resume_reading()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._check_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._end_timer()
        super().connection_lost(exc)

    def handle_events(self) -> None:
        # h11 limits only heads that arrive in several pieces.
        is_between, limit = self.conn.their_state is h11.IDLE, self.config.h11_max_incomplete_event_size or 0
        if is_between and (end := HEAD_END.search(self.conn.trailing_data[0])) is not None and end.start() > limit:
            self.send_400_response("the request's headers are too large")
            return
        super().handle_events()

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
        if self.is_answering and not is_between:
            self._end_timer()
        elif self._head_timer is None and (self.conn.trailing_data[0] or not is_between):
            self._expect_head()

    def _expect_head(self) -> None:
        self._head_timer = asyncio.get_running_loop().call_later(HEAD_SECONDS, self.transport.close)

    def _end_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None
