"""Owns the model thread: loads the backend in the background, then runs one work item at a time on it."""

import asyncio
import logging
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from specpool.protocol.errors import UnavailableError
from specpool.protocol.worker_info import CacheLoad, WorkerInfo
from specpool.worker.backend import Backend, DeviceFailedError, Failure, Startup, describe, failure_of
from specpool.worker.model_thread import ModelThread, Watchdog
from specpool.worker.round_merging import Round, RoundMerging
from specpool.worker.streams import RoundStreams

log = logging.getLogger(__name__)

LEASE_CHECKS_PER_LEASE = 4

T = TypeVar("T")
ServeRounds = Callable[[Sequence[Any], Any], list[Any]]
"""Maps the requests of different coordinators and the backend to the results of each. Raises for all of them."""


class WorkerHost:
    """Owner of the model thread and the backend on it."""

    def __init__(
        self, load: Callable[[Callable[[str], None]], Backend], clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`load`: builds the backend on the model thread; it gets a function to report its phases."""
        self.instance_id = uuid.uuid4().hex
        """Id of the process; a new one after each start."""
        self.startup = Startup()
        self.streams = RoundStreams(self._orphan)
        self.on_failure: Callable[[str], None] = lambda reason: None
        """Called with the reason before a call is answered if the process can no longer serve. Must end the process."""
        self.rounds = 0
        self.forward_ns = 0
        """Nanoseconds that rounds have taken, without realignment and the carried draft."""
        self._load, self.clock = load, clock
        self._thread = ModelThread(self._end)
        self._merging = RoundMerging()
        self._backend: Backend | None = None
        self._info: WorkerInfo | None = None
        self._cache_load: CacheLoad | None = None
        self._draft_load: CacheLoad | None = None
        self._orphans: dict[str, None] = {}
        """Coordinators to orphan before the next work item."""
        self._watchdog: Watchdog | None = None

    @property
    def is_loaded(self) -> bool:
        """Whether the backend has been built."""
        return self._backend is not None

    @property
    def backend(self) -> Any:
        """The backend. Only its constants and counters may be read here. UnavailableError while it loads."""
        if self._backend is None:
            raise UnavailableError("the model is still loading")
        return self._backend

    @property
    def info(self) -> WorkerInfo:
        """Description of the worker after the last work item. UnavailableError while the model loads."""
        if self._info is None:
            raise UnavailableError("the model is still loading")
        info = self._info if self._cache_load is None else replace(self._info, **self._cache_load._asdict())
        if info.draft is None or self._draft_load is None:
            return info
        return replace(info, draft=replace(info.draft, **self._draft_load._asdict()))

    @property
    def waiting(self) -> int:
        """Number of calls that wait for the model thread."""
        return self._thread.waiting

    @property
    def hanging(self) -> str | None:
        """A message for callers if the model thread hangs; None if it does not."""
        return self._watchdog.hanging if self._watchdog is not None else None

    async def load(self) -> None:
        """Build the backend on the model thread. Raises DeviceFailedError if another start may succeed."""
        report = self.startup.reporter()
        try:
            backend = await self._thread.run("loading the model", lambda: self._load(report))
            self._info = await self._thread.run("describing the model", backend.info)
        except Exception as error:
            self.startup.end(failure=str(error) or type(error).__name__)
            if failure_of(error) in (Failure.DEVICE, Failure.DEVICE_MEMORY):
                raise DeviceFailedError(describe(error)) from error
            raise
        self._backend = backend
        self.startup.end()

    async def run(self, work: Callable[[Any], T], coordinator_id: str | None = None, name: str = "a call") -> T:
        """Run `work(backend)` on the model thread. `name` describes it if it hangs.

        UnavailableError: the model is loading, hangs, or has too many calls waiting.
        """
        backend = self._ready_backend()
        serve = partial(self._serve, backend, work, coordinator_id)
        return await self._thread.run(name, partial(self._survive, backend, serve))

    async def serve_round(self, round_: Round, name: str, serve: ServeRounds) -> tuple[Any, dict[str, int]]:
        """Serve a round, perhaps together with others. Raises like `run`.

        Return its result, and the response's timing fields in nanoseconds.
        """
        backend = self._ready_backend()
        work = partial(self._serve_round, backend, serve, round_)
        self._merging.add(round_)
        try:
            return await self._thread.run(name, partial(self._survive, backend, work))
        finally:
            self._merging.discard(round_)

    async def watch(self, seconds: float, on_change: Callable[[bool], None]) -> None:
        """Watch the model thread until cancelled.

        `on_change`: called with True when a work item has made no progress for `seconds`, then with False once it
        does."""
        backend: Backend = self.backend
        self._watchdog = Watchdog(self._thread, lambda: backend.passes, seconds, on_change)
        await self._watchdog.watch()

    async def expire_leases(self, lease_seconds: float) -> None:
        """Free the sequences of silent coordinators periodically, until cancelled."""
        while True:
            await asyncio.sleep(lease_seconds / LEASE_CHECKS_PER_LEASE)
            try:
                freed = await self.run(lambda backend: backend.expire(self.clock(), lease_seconds), name="lease expiry")
            except UnavailableError:  # hanging or too busy: try again at the next check
                continue
            if freed:
                log.warning("freed %d sequences of coordinators silent for %g s", freed, lease_seconds)

    def drain(self) -> None:
        """End all streams of rounds, each after its current round, and all watches of the startup."""
        self.streams.drain()
        self.startup.end()

    def close(self, timeout: float | None = None) -> bool:
        """End the model thread after its current work item; False if that takes longer than `timeout` seconds."""
        return self._thread.close(timeout)

    def _end(self, reason: str) -> None:
        self.on_failure(reason)  # may be set after the thread has started

    def _ready_backend(self) -> Backend:
        backend: Backend = self.backend
        if (hanging := self.hanging) is not None:
            raise UnavailableError(hanging)
        return backend

    def _orphan(self, coordinator_id: str) -> None:
        """Defer to the model thread, which may still run work of this coordinator."""
        self._orphans[coordinator_id] = None

    def _survive(self, backend: Backend, work: Callable[[], T]) -> T:
        """Run repeatable work. If the device fails or memory runs out, end the process before the call is answered.

        If device memory runs out, first retry with smaller passes.
        """
        try:
            return work()
        except Exception as error:
            if (failure := failure_of(error)) is None:
                raise
            reason = f"{failure.value} ({describe(error)})"
        # Outside the except block, the traceback no longer keeps tensors alive.
        if failure is Failure.DEVICE_MEMORY and self._survive(backend, backend.shrink_passes):
            log.warning("%s; retrying with at most %d tokens per pass", reason, backend.max_num_batched_tokens)
            return self._survive(backend, work)
        self.on_failure(reason)
        raise UnavailableError(reason)

    def _serve(self, backend: Backend, work: Callable[[Any], T], coordinator_id: str | None) -> T:
        with self._leased(backend, () if coordinator_id is None else (coordinator_id,)):
            return work(backend)

    def _serve_round(self, backend: Backend, serve: ServeRounds, round_: Round) -> tuple[Any, dict[str, int]]:
        """Serve a round and those merged with it, unless an earlier round has taken it along."""
        if round_.response is None:
            rounds = self._merging.take(round_, backend.max_num_batched_tokens)
            try:
                self._serve_together(backend, serve, rounds)
            except Exception:
                if len(rounds) == 1:
                    raise
            if round_.response is None:  # repeating a round is safe
                self._serve_together(backend, serve, [round_])  # the others are served alone when their turn comes
        assert round_.response is not None
        return round_.response

    def _serve_together(self, backend: Backend, serve: ServeRounds, rounds: list[Round]) -> None:
        with self._leased(backend, [round_.coordinator_id for round_ in rounds]), self._merging.serving(rounds):
            began, realigned, drafted = time.perf_counter_ns(), backend.realign_ns, backend.draft_ns
            results = serve([round_.request for round_ in rounds], backend)
            realign_ns, draft_ns = backend.realign_ns - realigned, backend.draft_ns - drafted
            forward_ns = time.perf_counter_ns() - began - realign_ns - draft_ns
            spent = {"forward_ns": forward_ns, "realign_ns": realign_ns}
            if draft_ns:  # responses of draft workers have no such field
                spent["draft_ns"] = draft_ns
            for round_, result in zip(rounds, results, strict=True):
                round_.response = result, spent
            self.rounds += len(rounds)
            self.forward_ns += forward_ns

    @contextmanager
    def _leased(self, backend: Backend, coordinator_ids: Sequence[str]) -> Iterator[None]:
        """Renew the coordinators' leases before and after work, which may take longer than the lease."""
        while self._orphans:
            backend.orphan(self._orphans.popitem()[0])
        for coordinator_id in coordinator_ids:
            backend.renew_lease(coordinator_id, self.clock())
        try:
            yield
        finally:
            for coordinator_id in coordinator_ids:
                backend.renew_lease(coordinator_id, self.clock())
            self._cache_load = backend.load
            self._draft_load = backend.carried_draft.load if backend.carried_draft is not None else None
