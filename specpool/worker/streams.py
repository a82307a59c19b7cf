"""Streams of rounds: their number, their owners, and how they end."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any

from specpool.protocol.codec import require_coordinator
from specpool.protocol.errors import InvalidArgumentError, QueueFullError

MAX_STREAMS = 64
"""Maximum open streams of all coordinators together. A coordinator opens one for each group in flight."""
MAX_STREAMS_PER_CLIENT = 16
RETRY_SECONDS = 1.0
ORPHANED_SECONDS = 2.0
"""Time after which a coordinator without streams counts as gone. A reconnecting one returns sooner."""


class RoundStreams:
    """The open streams of a worker. A stream belongs to the coordinator of its first request."""

    def __init__(self, on_orphaned: Callable[[str], None]) -> None:
        """`on_orphaned`: called with a coordinator's id some time after its last stream has ended."""
        self._on_orphaned = on_orphaned
        self._open: Counter[str] = Counter()
        """By client."""
        self._owned: Counter[str] = Counter()
        self._reading: set[asyncio.Future[Any]] = set()
        self._draining = False

    @property
    def open(self) -> int:
        """Number of open streams."""
        return self._open.total()

    async def each(
        self, requests: AsyncIterator[Any], answer: Callable[[Any], Awaitable[Any]], client: str = ""
    ) -> AsyncIterator[Any]:
        """Answers a stream of rounds until the caller ends it, or until a drain does between two rounds.

        Reads the next request once a round is answered, so HTTP/2 flow control holds back faster callers.
        QueueFullError, InvalidArgumentError.
        """
        if self._draining or self._refusal(client):
            await _touch(requests)
        with self._counted(client):
            if (request := await self._next(requests)) is None:
                return
            owner = request.coordinator_id
            require_coordinator(owner)
            with self._owned_by(owner):
                while request is not None:
                    if request.coordinator_id != owner:
                        raise InvalidArgumentError("coordinator_id", "must be the same in all requests of a stream")
                    yield await answer(request)
                    request = await self._next(requests)

    def drain(self) -> None:
        """Ends all streams, each after its current round."""
        self._draining = True
        for reading in self._reading:
            reading.cancel()

    async def _next(self, requests: AsyncIterator[Any]) -> Any:
        """The next request; None at the end of the stream or during a drain."""
        if self._draining:
            return None
        reading = asyncio.ensure_future(anext(requests, None))
        self._reading.add(reading)
        try:
            await asyncio.wait([reading])
        finally:
            self._reading.discard(reading)
            reading.cancel()
        return None if reading.cancelled() else reading.result()

    @contextmanager
    def _counted(self, client: str) -> Iterator[None]:
        if refusal := self._refusal(client):
            raise QueueFullError(refusal, RETRY_SECONDS)
        self._open[client] += 1
        try:
            yield
        finally:
            self._open[client] -= 1
            if not self._open[client]:
                del self._open[client]

    def _refusal(self, client: str) -> str:
        """Why a client may not open a stream; empty if it may."""
        if self._open.total() >= MAX_STREAMS:
            return f"{self._open.total()} streams of rounds are open"
        if self._open[client] >= MAX_STREAMS_PER_CLIENT:
            return f"{self._open[client]} streams of rounds of this client are open"
        return ""

    @contextmanager
    def _owned_by(self, coordinator_id: str) -> Iterator[None]:
        self._owned[coordinator_id] += 1
        try:
            yield
        finally:
            self._owned[coordinator_id] -= 1
            if not self._owned[coordinator_id]:
                del self._owned[coordinator_id]
                asyncio.get_running_loop().call_later(ORPHANED_SECONDS, self._orphan, coordinator_id)

    def _orphan(self, coordinator_id: str) -> None:
        if coordinator_id not in self._owned:
            self._on_orphaned(coordinator_id)


async def _touch(requests: AsyncIterator[Any]) -> None:
    """Begins to read and stops at once: gRPC warns of requests that were never read."""
    reading = asyncio.ensure_future(anext(requests, None))
    await asyncio.wait([reading], timeout=0)
    reading.cancel()
