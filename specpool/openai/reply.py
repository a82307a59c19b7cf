"""The answer to one HTTP request, whole or as server-sent events."""

import asyncio
from collections.abc import Coroutine, Mapping
from typing import Any

from starlette.types import Receive, Send

from specpool.openai.metrics import Observed

STREAM_HEADERS = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-cache",
    "x-accel-buffering": "no",  # nginx
}


class Reply:
    def __init__(self, send: Send, observed: Observed) -> None:
        self._send, self._observed = send, observed
        self.has_begun = False
        """Whether the status has been sent."""

    async def json(self, body: bytes, status: int = 200, headers: Mapping[str, str] | None = None) -> None:
        """Send a complete response."""
        length = {"content-type": "application/json", "content-length": str(len(body))}
        await self._begin(status, {**length, **(headers or {})})
        await self.end(body)

    async def begin_stream(self, headers: Mapping[str, str]) -> None:
        await self._begin(200, {**STREAM_HEADERS, **headers})

    async def write(self, data: bytes) -> None:
        """Send part of a stream. Waits while the client does not read."""
        await self._send({"type": "http.response.body", "body": data, "more_body": True})

    async def end(self, data: bytes) -> None:
        """Send the last part."""
        await self._send({"type": "http.response.body", "body": data, "more_body": False})

    async def _begin(self, status: int, headers: Mapping[str, str]) -> None:
        self.has_begun, self._observed.status = True, status
        pairs = [(name.encode(), value.encode()) for name, value in headers.items()]
        await self._send({"type": "http.response.start", "status": status, "headers": pairs})


async def while_connected(receive: Receive, answering: Coroutine[Any, Any, None]) -> None:
    """Answer a request whose body has been read. Cancel it when the client disconnects."""
    tasks = [asyncio.create_task(answering), asyncio.create_task(_disconnected(receive))]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
    if not tasks[0].cancelled():
        tasks[0].result()


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
