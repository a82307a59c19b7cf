"""Streams of rounds: limits, owners, and draining."""

import asyncio
from collections import Counter, deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import contextmanager
from itertools import islice
from typing import Any

from specpool.protocol.codec import require_coordinator
from specpool.protocol.errors import InvalidArgumentError, QueueFullError

MAX_STREAMS = 64
"""Maximum open streams of all coordinators together. A coordinator opens one for each group in flight."""
MAX_STREAMS_PER_CLIENT = 16
MAX_ROUNDS_AHEAD = 2
"""Rounds of a stream that may wait for the model behind the one that runs."""
RETRY_SECONDS = 1.0
ORPHANED_SECONDS = 2.0
"""Time after which a coordinator without streams counts as gone. Reconnecting takes less."""


class RoundStreams:
    """The open streams of a worker. A stream belongs to the coordinator of its first request."""

    def __init__(self, on_orphaned: Callable[[str], None]) -> None:
        """`on_orphaned`: called with a coordinator's id some time after its last stream has ended."""
        self._on_orphaned = on_orphaned
        self.max_per_client, self.orphaned_seconds = MAX_STREAMS_PER_CLIENT, ORPHANED_SECONDS
        self._open: Counter[str] = Counter()
        """By client."""
        self._owned: Counter[str] = Counter()
        self._reading: set[asyncio.Future[Any]] = set()
        self._draining = False

    @property
    def open(self) -> int:
        return self._open.total()

    async def each(
        self, requests: AsyncIterator[Any], answer: Callable[[Any], Awaitable[Any]], client: str = ""
    ) -> AsyncIterator[Any]:
        """Answer a stream of rounds until the caller ends it, or a drain ends it after the rounds read so far.

        Reads at most `MAX_ROUNDS_AHEAD` requests beyond the round that runs, so HTTP/2 flow control holds back faster
        callers. Raises QueueFullError or InvalidArgumentError.
        """
        if self._draining or self._refusal(client):
            await _touch(requests)
        with self._counted(client):
            reading = self._read(requests)
            await asyncio.wait([reading])
            if (request := _read_or_none(reading)) is None:
                return
            owner = request.coordinator_id
            require_coordinator(owner)

            async def answer_own(request: Any) -> Any:
                if request.coordinator_id != owner:
                    raise InvalidArgumentError("coordinator_id", "must be the same in all requests of a stream")
                return await answer(request)

            with self._owned_by(owner):
                async for response in self._answers(request, requests, answer_own):
                    yield response

    def drain(self) -> None:
        """End all streams, each after its current round."""
        self._draining = True
        for reading in self._reading:
            reading.cancel()

    async def _answers(
        self, first: Any, requests: AsyncIterator[Any], answer: Callable[[Any], Awaitable[Any]]
    ) -> AsyncIterator[Any]:
        """Answer the requests in order. The model gets each one before the previous one is answered."""
        answering = deque([asyncio.ensure_future(answer(first))])
        reading: asyncio.Future[Any] | None = None
        has_more = True
        try:
            while answering or has_more:
                if reading is None and has_more and len(answering) <= MAX_ROUNDS_AHEAD:
                    reading = self._read(requests)
                waiting = [future for future in (*islice(answering, 1), reading) if future is not None]
                await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                if reading is not None and reading.done():
                    request, reading = _read_or_none(reading), None
                    has_more = request is not None
                    if has_more:
                        answering.append(asyncio.ensure_future(answer(request)))
                if answering and answering[0].done():
                    yield answering.popleft().result()
        finally:
            for future in (*answering, *([reading] if reading is not None else [])):
                future.cancel()

    def _read(self, requests: AsyncIterator[Any]) -> asyncio.Future[Any]:
        """Start to read the next request. A drain cancels the future."""
        reading = asyncio.ensure_future(anext(requests, None))
        if self._draining:
            reading.cancel()
        self._reading.add(reading)
        reading.add_done_callback(self._reading.discard)
        return reading

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
        """Return why a client may not open a stream; empty if it may."""
        if self._open.total() >= MAX_STREAMS:
            return f"{self._open.total()} streams of rounds are open"
        if self._open[client] >= self.max_per_client:
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
                asyncio.get_running_loop().call_later(self.orphaned_seconds, self._orphan, coordinator_id)

    def _orphan(self, coordinator_id: str) -> None:
        if coordinator_id not in self._owned:
            self._on_orphaned(coordinator_id)


def _read_or_none(reading: asyncio.Future[Any]) -> Any:
    """Return the request; None at the end of the stream or during a drain."""
    return None if reading.cancelled() else reading.result()


async def _touch(requests: AsyncIterator[Any]) -> None:
    """Start to read, then stop at once: gRPC warns about requests that are never read."""
    reading = asyncio.ensure_future(anext(requests, None))
    await asyncio.wait([reading], timeout=0)
    reading.cancel()
