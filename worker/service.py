"""What both workers' servers share: load in the background, describe, release, and free what a silent coordinator left.

Knows no model: a backend does the work on the one model thread.
"""

import asyncio
import contextlib
import enum
import logging
import os
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, TypeVar

from pydantic import Field

from protocol.sampling import read_sampling
from rpc.channel import MAX_WORKER_MESSAGE_BYTES
from rpc.errors import InvalidArgumentError, UnavailableError
from rpc.server import Server, configure_logging
from rpc.settings import Seconds, ServerSettings
from specpool.v1 import common_pb2 as pb
from worker.model_thread import ModelThread

log = logging.getLogger(__name__)

LEASE_CHECKS_PER_LEASE = 4


class Backend(Protocol):
    """What a worker does, on the model thread."""

    @property
    def realign_ns(self) -> int:
        """Nanoseconds spent on realignment so far."""

    def info(self) -> Any:
        """The fields of `ModelInfo` and `WorkerLoad` as they are now, with `bitwise` for the equivalence."""

    def release(self, coordinator_id: str, sequence_ids: list[int]) -> int:
        """Frees sequences; returns how many held a slot."""

    def renew_lease(self, coordinator_id: str, now: float) -> None:
        """Notes that a coordinator is alive."""

    def expire(self, now: float, lease_seconds: float) -> int:
        """Frees the sequences of silent coordinators; returns how many."""


T = TypeVar("T")


class WorkerSettings(ServerSettings):
    """What every worker has, whatever it runs."""

    lease_seconds: Seconds = Field(
        60.0, gt=0, description="sequences of a coordinator that was silent for so long are freed"
    )


class WorkerHost:
    """Owns the model thread and the backend on it."""

    def __init__(self, load: Callable[[], Backend]) -> None:
        self._load = load
        self._thread = ModelThread()
        self._backend: Backend | None = None
        self._streams: set[asyncio.Queue[Any]] = set()
        self._draining = False

    @property
    def is_loaded(self) -> bool:
        """Whether the backend is there."""
        return self._backend is not None

    async def load(self) -> None:
        """Builds the backend on the model thread."""
        self._backend = await self._thread.run(self._load)

    async def run(self, work: Callable[[Any], T], coordinator_id: str | None = None) -> T:
        """`work(backend)` on the model thread. UnavailableError while the model is still loading."""
        if self._backend is None:
            raise UnavailableError("the model is still loading")
        backend = self._backend

        def serve() -> T:
            if coordinator_id is not None:
                backend.renew_lease(coordinator_id, time.monotonic())
            return work(backend)

        return await self._thread.run(serve)

    async def expire_leases(self, lease_seconds: float) -> None:
        """Frees, for ever, what silent coordinators hold."""
        while True:
            await asyncio.sleep(lease_seconds / LEASE_CHECKS_PER_LEASE)
            freed = await self.run(lambda backend: backend.expire(time.monotonic(), lease_seconds))
            if freed:
                log.warning("freed %d sequences of coordinators silent for %g s", freed, lease_seconds)

    async def each(self, requests: AsyncIterator[Any], answer: Callable[[Any], Awaitable[Any]]) -> AsyncIterator[Any]:
        """Answers of a stream of rounds, until the caller or a drain ends it: between two rounds, never in one."""
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
        """Ends all streams of rounds after the round that they are in."""
        self._draining = True
        for waiting in self._streams:
            waiting.put_nowait(None)

    def close(self) -> None:
        """Ends the model thread."""
        self._thread.close()


async def _read(requests: AsyncIterator[Any], waiting: asyncio.Queue[Any]) -> None:
    """Hands over the requests of a stream, what is wrong with one, and its end."""
    try:
        async for request in requests:
            waiting.put_nowait(request)
    except Exception as error:  # which is answered, by whoever reads the queue
        waiting.put_nowait(error)
    else:
        waiting.put_nowait(None)


class WorkerServicer:
    """The RPCs that both worker services have. Their servicers extend it."""

    def __init__(self, host: WorkerHost) -> None:
        self._host = host

    async def Release(self, request: pb.ReleaseRequest, context: Any) -> pb.ReleaseResponse:
        """Frees sequences."""
        require_coordinator(request.coordinator_id)
        ids = list(request.sequence_ids)
        released = await self._host.run(
            lambda backend: backend.release(request.coordinator_id, ids), request.coordinator_id
        )
        return pb.ReleaseResponse(released=released)

    async def GetWorkerInfo(self, request: pb.GetWorkerInfoRequest, context: Any) -> pb.GetWorkerInfoResponse:
        """Describes the worker."""
        info = await self._host.run(lambda backend: backend.info())
        equivalence = pb.EQUIVALENCE_BITWISE if info.bitwise else pb.EQUIVALENCE_NUMERIC
        model = pb.ModelInfo(
            model=info.model,
            architecture=info.architecture,
            dtype=info.dtype,
            device=info.device,
            vocab_size=info.vocab_size,
            max_model_len=info.max_model_len,
            tokenizer_fingerprint=info.tokenizer_fingerprint,
            equivalence=equivalence,
            parameters=info.parameters,
        )
        load = pb.WorkerLoad(
            slots_total=info.slots_total,
            slots_in_use=info.slots_in_use,
            kv_bytes_per_token=info.kv_bytes_per_token,
            kv_bytes_total=info.kv_bytes_total,
            kv_layout=info.kv_layout,
            weight_bytes=info.weight_bytes,
            activation_bytes=info.activation_bytes,
            kv_positions_total=info.kv_positions_total,
            kv_positions_free=info.kv_positions_free,
            kv_positions_multiple=info.kv_positions_multiple,
        )
        costs = pb.StepCosts(
            rows=info.step_seconds.keys(),
            seconds=info.step_seconds.values(),
            cached=info.step_cached,
            seconds_per_cached=info.seconds_per_cached,
        )
        return pb.GetWorkerInfoResponse(model=model, load=load, costs=costs)


def require_coordinator(coordinator_id: str) -> None:
    """InvalidArgumentError for an empty id: sequences without an owner could never expire."""
    if not coordinator_id:
        raise InvalidArgumentError("coordinator_id", "must not be empty")


@dataclass(frozen=True)
class RoundLimits:
    """What the items of a round are checked against."""

    vocab_size: int
    max_model_len: int
    room: Callable[[int], int | None]
    """Positions that a sequence has room for; None if it is new."""


def round_limits(backend: Any, coordinator_id: str) -> RoundLimits:
    """Those of a coordinator at a backend with an engine."""
    return RoundLimits(backend.engine.vocab_size, backend.engine.max_model_len, partial(backend.room, coordinator_id))


def check_item(index: int, item: Any, limits: RoundLimits, drafts: int, seen: set[int]) -> None:
    """InvalidArgumentError if an item of a round could not be served whatever is cached.

    `drafts`: positions that it takes beyond its tokens. `seen`: sequences of the round so far; this one joins them.
    """
    vocab_size, max_model_len = limits.vocab_size, limits.max_model_len
    field = f"items[{index}]"
    if item.sequence_id in seen:
        raise InvalidArgumentError(f"{field}.sequence_id", f"{item.sequence_id} occurs twice in the round")
    seen.add(item.sequence_id)
    if item.HasField("prefix_sequence_id") and not item.base_length:
        raise InvalidArgumentError(f"{field}.base_length", "must be above 0 with prefix_sequence_id")
    if not item.token_ids:
        raise InvalidArgumentError(f"{field}.token_ids", "must not be empty")
    if max(item.token_ids) >= vocab_size:
        raise InvalidArgumentError(f"{field}.token_ids", f"{max(item.token_ids)} is not below {vocab_size}")
    asked = item.max_length if item.HasField("max_length") else max_model_len
    if asked > max_model_len:
        raise InvalidArgumentError(f"{field}.max_length", f"{asked} is above {max_model_len}")
    room = limits.room(item.sequence_id)
    most = min(max_model_len, asked if room is None else room)
    end = item.base_length + len(item.token_ids) + drafts
    if end > most:
        raise InvalidArgumentError(field, f"would reach {end} positions of at most {most}")


def extension_fields(item: Any, index: int, sampling_type: Callable[..., Any]) -> dict[str, Any]:
    """What the items of both workers begin with, as `engine.sequences.Extension` names it. InvalidArgumentError."""
    return {
        "sequence_id": item.sequence_id,
        "base_length": item.base_length,
        "token_ids": tuple(item.token_ids),
        "sampling": read_sampling(item, index, sampling_type),
        "prefix_sequence_id": item.prefix_sequence_id if item.HasField("prefix_sequence_id") else None,
        "max_length": item.max_length if item.HasField("max_length") else None,
    }


def timed(backend: Backend, work: Callable[[], T]) -> tuple[T, dict[str, int]]:
    """`work()` of the backend, and how long it took under the names that responses have for it."""
    began, realigned = time.perf_counter_ns(), backend.realign_ns
    result = work()
    realign_ns = backend.realign_ns - realigned
    return result, {"forward_ns": time.perf_counter_ns() - began - realign_ns, "realign_ns": realign_ns}


def wire_status(realignment: enum.Enum) -> str:
    """`engine.cache.slots.Realignment` as the wire names it: the names are the same."""
    return f"ITEM_STATUS_{realignment.name}"


def run_worker(
    program: str,
    settings: WorkerSettings,
    load: Callable[[], Backend],
    service: str,
    register: Callable[[Any, Any], None],
    servicer: type[WorkerServicer],
    refusals: tuple[type[Exception], ...],
) -> None:
    """The life of a worker process: `load` builds its backend, `servicer` serves it as `service` until SIGTERM.

    An error of `refusals` ends it with one line instead of a stack trace.
    """
    configure_logging(settings.log_level)
    settings.log_resolved()
    host = WorkerHost(load)
    expected: tuple[type[BaseException], ...] = (*refusals, OSError)
    try:
        asyncio.run(_serve(settings, host, lambda server: server.add(service, register, servicer(host))))
    except expected as error:
        sys.exit(f"{program}: {error}")


async def _serve(settings: WorkerSettings, host: WorkerHost, add_service: Callable[[Server], None]) -> None:
    """Listens at once, serves when the model is loaded, drains on SIGTERM. Raises what loading raises."""
    server = Server(settings, MAX_WORKER_MESSAGE_BYTES)
    add_service(server)
    server.on_drain = host.drain
    await server.start()
    server.stop_on_signals()

    async def load_and_serve() -> None:
        await host.load()
        await server.set_serving(True)
        log.info("serving")
        await host.expire_leases(settings.lease_seconds)

    serving = asyncio.create_task(load_and_serve())
    serving.add_done_callback(lambda task: server.stop())
    await server.wait_stopped()
    if not serving.done() and not host.is_loaded:
        log.warning("stopped while the model was loading")
        os._exit(0)  # nothing interrupts a thread that loads
    serving.cancel()
    host.close()
    with contextlib.suppress(asyncio.CancelledError):
        await serving
