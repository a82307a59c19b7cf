"""The model thread and the backend on it: loaded in the background, called one work item at a time."""

import asyncio
import logging
import time
import uuid
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol, TypeVar

from specpool.protocol.errors import UnavailableError
from specpool.protocol.rounds import RoundLimits
from specpool.protocol.worker_info import CacheLoad, WorkerInfo
from specpool.worker.model_thread import ModelThread
from specpool.worker.streams import RoundStreams
from specpool.worker.watchdog import Watchdog

log = logging.getLogger(__name__)

LEASE_CHECKS_PER_LEASE = 4

T = TypeVar("T")


class Backend(Protocol):
    """Interface of a worker's work, called on the model thread."""

    @property
    def realign_ns(self) -> int:
        """Nanoseconds spent on realignment so far."""

    @property
    def passes(self) -> int:
        """Number of forward passes so far. Read by any thread."""

    @property
    def tokens(self) -> int:
        """Number of tokens that these passes have run. Read by any thread."""

    def info(self) -> WorkerInfo:
        """Description of the model and its present load. Called once, when the model is loaded."""

    @property
    def load(self) -> CacheLoad:
        """The present load alone. Read after each work item, so it takes microseconds."""

    def limits(self, coordinator_id: str) -> RoundLimits:
        """Limits that the items of a coordinator's round are checked against."""

    def release(self, coordinator_id: str, sequence_ids: list[int]) -> int:
        """Frees sequences; returns the number that held a slot."""

    def renew_lease(self, coordinator_id: str, now: float) -> None:
        """Records that a coordinator is alive."""

    def orphan(self, coordinator_id: str) -> None:
        """Records that a coordinator may be gone: until its lease is renewed, its sequences yield their slots."""

    def expire(self, now: float, lease_seconds: float) -> int:
        """Frees the sequences of silent coordinators; returns their number."""


class WorkerHost:
    """Owner of the model thread and the backend on it."""

    def __init__(self, load: Callable[[], Backend]) -> None:
        self.instance_id = uuid.uuid4().hex
        """Id of the process; a new one after each start."""
        self.streams = RoundStreams(self._orphan)
        self.rounds = 0
        self.forward_ns = 0
        """Nanoseconds that rounds have taken, without realignment."""
        self._load = load
        self._thread = ModelThread()
        self._backend: Backend | None = None
        self._info: WorkerInfo | None = None
        self._cache_load: CacheLoad | None = None
        self._orphans: dict[str, None] = {}
        """Orphaned coordinators that the backend has yet to hear about. Each had an open stream before, so they are
        few."""
        self._watchdog: Watchdog | None = None

    @property
    def is_loaded(self) -> bool:
        """Whether the backend has been built."""
        return self._backend is not None

    @property
    def backend(self) -> Any:
        """The backend, for what never changes; all else is the model thread's. UnavailableError while it loads."""
        if self._backend is None:
            raise UnavailableError("the model is still loading")
        return self._backend

    @property
    def info(self) -> WorkerInfo:
        """Description of the worker after the last work item, also while another one runs. UnavailableError while the
        model is still loading."""
        if self._info is None:
            raise UnavailableError("the model is still loading")
        return self._info if self._cache_load is None else self._info.with_load(self._cache_load)

    @property
    def waiting(self) -> int:
        """Number of calls that wait for the model thread."""
        return self._thread.waiting

    @property
    def hanging(self) -> str | None:
        """What the model thread has been found to hang in, as a message for callers; None if it does not hang."""
        return self._watchdog.hanging if self._watchdog is not None else None

    async def load(self) -> None:
        """Builds the backend on the model thread."""
        backend = await self._thread.run("loading the model", self._load)
        self._info = await self._thread.run("describing the model", backend.info)
        self._backend = backend

    async def run(self, work: Callable[[Any], T], coordinator_id: str | None = None, name: str = "a call") -> T:
        """Runs `work(backend)` on the model thread; `name` says what it is if it hangs.

        UnavailableError while the model is still loading, hangs, or has too many calls waiting.
        """
        backend = self.backend
        if (hanging := self.hanging) is not None:
            raise UnavailableError(hanging)
        return await self._thread.run(name, partial(self._serve, backend, work, coordinator_id))

    def timed(self, backend: Backend, work: Callable[[], T]) -> tuple[T, dict[str, int]]:
        """Runs the work of a round, on the model thread; returns its result and its duration under the field names of
        responses."""
        began, realigned = time.perf_counter_ns(), backend.realign_ns
        result = work()
        realign_ns = backend.realign_ns - realigned
        forward_ns = time.perf_counter_ns() - began - realign_ns
        self.rounds += 1
        self.forward_ns += forward_ns
        return result, {"forward_ns": forward_ns, "realign_ns": realign_ns}

    async def watch(self, seconds: float, on_change: Callable[[bool], None]) -> None:
        """Watches the model thread for ever. `on_change`: called with True when a work item has made no progress for
        `seconds`, and with False once the thread gets on."""
        backend: Backend = self.backend
        self._watchdog = Watchdog(self._thread, lambda: backend.passes, seconds, on_change)
        await self._watchdog.watch()

    async def expire_leases(self, lease_seconds: float) -> None:
        """Frees the sequences of silent coordinators at regular intervals, until cancelled."""
        while True:
            await asyncio.sleep(lease_seconds / LEASE_CHECKS_PER_LEASE)
            try:
                freed = await self.run(
                    lambda backend: backend.expire(time.monotonic(), lease_seconds), name="the check of leases"
                )
            except UnavailableError:  # the model hangs or is too busy: the next check will do
                continue
            if freed:
                log.warning("freed %d sequences of coordinators silent for %g s", freed, lease_seconds)

    def drain(self) -> None:
        """Ends all streams of rounds, each after its current round."""
        self.streams.drain()

    def close(self, timeout: float | None = None) -> bool:
        """Ends the model thread once what it runs has ended; False if that takes longer than `timeout` seconds."""
        return self._thread.close(timeout)

    def _orphan(self, coordinator_id: str) -> None:
        """Leaves a note for the model thread, which must learn of it only after the work that the coordinator has
        begun."""
        self._orphans[coordinator_id] = None

    def _serve(self, backend: Backend, work: Callable[[Any], T], coordinator_id: str | None) -> T:
        while self._orphans:
            backend.orphan(self._orphans.popitem()[0])
        if coordinator_id is not None:
            backend.renew_lease(coordinator_id, time.monotonic())
        try:
            return work(backend)
        finally:
            if coordinator_id is not None:  # the work may have taken longer than the lease
                backend.renew_lease(coordinator_id, time.monotonic())
            self._cache_load = backend.load
