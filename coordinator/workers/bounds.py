"""Limits on what a worker can make the coordinator read: response sizes and the rate of startup phases."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from specpool.protocol.responses import MAX_SMALL_BYTES
from specpool.rpc.security.channel import MAX_WORKER_MESSAGE_BYTES

PHASES_PER_PROBE = 16
"""Startup phases read between two health probes. A whole startup has about this many."""
TOKENIZER, ROUNDS = "GetTokenizer", {"Verify", "VerifyStream", "Propose", "ProposeStream"}
KINDS_OF_CALLS = "unary_unary", "unary_stream", "stream_stream"


class ResponseSizes:
    """Rejects responses that are larger than any valid response to the current calls, before parsing them."""

    def __init__(self) -> None:
        self._expected: list[Callable[[], int]] = []
        """For each round in progress, a function that returns the maximum size of its response."""

    @contextmanager
    def in_round(self, max_bytes: Callable[[], int]) -> Iterator[None]:
        """Allow round responses of up to `max_bytes()`, which is called only for large responses."""
        self._expected.append(max_bytes)
        try:
            yield
        finally:
            self._expected.remove(max_bytes)

    def bounded(self, channel: Any) -> Any:
        """Wrap a channel for a stub. Calls return None for oversized responses, as for undecodable ones."""
        return SimpleNamespace(**{kind: partial(self._calls, getattr(channel, kind)) for kind in KINDS_OF_CALLS})

    def _calls(
        self, make: Callable[..., Any], path: str, request_serializer: Any, response_deserializer: Any, **options: Any
    ) -> Any:
        method = path.rpartition("/")[2]

        def parse(payload: bytes) -> Any:
            if not self._fits(method, len(payload)):
                return None
            try:
                return response_deserializer(payload)
            except DecodeError:
                return None

        return make(path, request_serializer=request_serializer, response_deserializer=parse, **options)

    def _fits(self, method: str, size: int) -> bool:
        if size <= MAX_SMALL_BYTES:
            return True
        if method in ROUNDS:
            return any(size <= max_bytes() for max_bytes in self._expected)
        return method == TOKENIZER and size <= MAX_WORKER_MESSAGE_BYTES


async def read_slowly(call: Any, seconds: float) -> AsyncGenerator[Any, None]:
    """Yield a call's responses, at most `PHASES_PER_PROBE` per `seconds`, and `...` after each such interval."""
    reading = asyncio.ensure_future(call.read())
    try:
        while True:
            deadline = asyncio.get_running_loop().time() + seconds
            for _ in range(PHASES_PER_PROBE):
                await asyncio.wait([reading], timeout=max(0.0, deadline - asyncio.get_running_loop().time()))
                if not reading.done():
                    break
                if (response := reading.result()) is grpc.aio.EOF:
                    return
                reading = asyncio.ensure_future(call.read())
                yield response
            await asyncio.sleep(max(0.0, deadline - asyncio.get_running_loop().time()))
            yield ...
    finally:
        call.cancel()
        await asyncio.gather(reading, return_exceptions=True)
