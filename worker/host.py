"""The model thread and the backend on it: loaded in the background, called one work item at a time."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, Protocol, TypeVar

from protocol.errors import UnavailableError
from protocol.rounds import RoundLimits
from protocol.worker_info import WorkerInfo
from worker.model_thread import ModelThread

log = logging.getLogger(__name__)

LEASE_CHECKS_PER_LEASE = 4

T = TypeVar("T")


class Backend(Protocol):
    """Interface of a worker's work, called on the model thread."""

    @property
    def realign_ns(self) -> int:
        """Nanoseconds spent on realignment so far."""

    def info(self) -> WorkerInfo:
        """Description of the model and its present load."""

    def limits(self, coordinator_id: str) -> RoundLimits:
        """Limits that the items of a coordinator's round are checked against."""

    def release(self, coordinator_id: str, sequence_ids: list[int]) -> int:
        """Frees sequences; returns the number that held a slot."""

    def renew_lease(self, coordinator_id: str, now: float) -> None:
        """Records that a coordinator is alive."""

    def expire(self, now: float, lease_seconds: float) -> int:
        """Frees the sequences of silent coordinators; returns their number."""


class WorkerHost:
    """Owner of the model thread and the backend on it."""

    def __init__(self, load: Callable[[], Backend]) -> None:
        self._load = load
        self._thread = ModelThread()
        self._backend: Backend | None = None
        self._streams: set[asyncio.Queue[Any]] = set()
        self._draining = False

    @property
    def is_loaded(self) -> bool:
        """Whether the backend has been built."""
        return self._backend is not None

    async def load(self) -> None:
        """Builds the backend on the model thread."""
        self._backend = await self._thread.run(self._load)

    async def run(self, work: Callable[[Any], T], coordinator_id: str | None = None) -> T:
        """Runs `work(backend)` on the model thread. UnavailableError while the model is still loading."""
        if self._backend is None:
            raise UnavailableError("the model is still loading")
        backend = self._backend

        def serve() -> T:
            if coordinator_id is None:
                return work(backend)
            backend.renew_lease(coordinator_id, time.monotonic())
            try:
                return work(backend)
            finally:  # the work may have taken longer than the lease
                backend.renew_lease(coordinator_id, time.monotonic())

        return await self._thread.run(serve)

    async def expire_leases(self, lease_seconds: float) -> None:
        """Frees the sequences of silent coordinators at regular intervals, until cancelled."""
        while True:
            await asyncio.sleep(lease_seconds / LEASE_CHECKS_PER_LEASE)
            freed = await self.run(lambda backend: backend.expire(time.monotonic(), lease_seconds))
            if freed:
                log.warning("freed %d sequences of coordinators silent for %g s", freed, lease_seconds)

    async def each(self, requests: AsyncIterator[Any], answer: Callable[[Any], Awaitable[Any]]) -> AsyncIterator[Any]:
        """Answers a stream of rounds until the caller or a drain ends it, which never happens within a round."""
        waiting: asyncio.Queue[Any] = asyncio.Queue()
        reading = asyncio.create_task(_read(requests, waiting))
        self._streams.add(waiting)
        try:
            while not self._draining and (request := await waiting.get()) is not None:
                if isinstance(request, Exception):
                    raise request
                yield await answer(request)
        finally:
            self._streams.discard(waiting)
            reading.cancel()

    def drain(self) -> None:
        """Ends all streams of rounds, each after its current round."""
        self._draining = True
        for waiting in self._streams:
            waiting.put_nowait(None)

    def close(self) -> None:
        """Ends the model thread."""
        self._thread.close()


def timed(backend: Backend, work: Callable[[], T]) -> tuple[T, dict[str, int]]:
    """Runs `work()`; returns its result and its duration under the field names of responses."""
    began, realigned = time.perf_counter_ns(), backend.realign_ns
    result = work()
    realign_ns = backend.realign_ns - realigned
    return result, {"forward_ns": time.perf_counter_ns() - began - realign_ns, "realign_ns": realign_ns}


async def _read(requests: AsyncIterator[Any], waiting: asyncio.Queue[Any]) -> None:
    """Puts the requests of a stream into a queue, and at the end None or the stream's error."""
    try:
        async for request in requests:
            waiting.put_nowait(request)
    except Exception as error:  # raised by the reader of the queue
        waiting.put_nowait(error)
    else:
        waiting.put_nowait(None)
