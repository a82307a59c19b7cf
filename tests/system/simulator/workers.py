"""Simulated workers: the real host, servicers and backends, with a virtual model thread and faults."""

import asyncio
import logging
import random
from collections import deque
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any

from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from draft_worker.server import DraftWorkerServicer
from simulator.answers import Tampering
from simulator.clock import VirtualLoop
from simulator.engine import ToyEngine, ToyProposer, ToyVerifier
from simulator.model import ToyPair
from simulator.network import Handlers, Network
from simulator.setup import WorkerSetup
from specpool.protocol.errors import UnavailableError
from specpool.v1 import draft_worker_pb2_grpc, target_worker_pb2_grpc
from specpool.worker.host import WorkerHost
from specpool.worker.model_thread import MAX_WAITING, WorkItem
from specpool.worker.round_merging import Round, RoundMerging
from target_worker.server import TargetWorkerServicer

log = logging.getLogger(__name__)

LOAD_SECONDS = 0.3
WATCHDOG_SECONDS = 4.0
LEASE_SECONDS = 60.0


class VirtualThread:
    """Stands in for `ModelThread`: runs a function at once, and delivers its result when its time is over."""

    def __init__(self, loop: VirtualLoop, spawn: Callable[[Coroutine[Any, Any, None]], None]) -> None:
        self.running: WorkItem | None = None
        self.slowness = 1.0
        self.hang = 0.0
        """Seconds for which the next function hangs."""
        self._loop, self._spawn = loop, spawn
        self._waiting: deque[WorkItem] = deque()
        self._is_working = False

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    def stack(self) -> str:
        return "the simulator"

    def close(self, timeout: float | None = None) -> bool:
        return True

    async def run(self, name: str, function: Callable[[], Any]) -> Any:
        """Like `ModelThread.run`."""
        item = WorkItem(name, function, self._loop, self._loop.create_future())
        if len(self._waiting) >= MAX_WAITING:
            raise UnavailableError(f"{len(self._waiting)} calls wait for the model")
        self._waiting.append(item)
        if not self._is_working:
            self._is_working = True
            self._spawn(self._work())
        try:
            return await item.result
        except asyncio.CancelledError:
            if item in self._waiting:
                self._waiting.remove(item)
            raise

    async def _work(self) -> None:
        while self._waiting:
            item = self.running = self._waiting.popleft()
            item.began = self._loop.now
            with self._loop.working():
                item.run()
                seconds = self._loop.lead * self.slowness + self.hang
            self.hang = 0.0
            await asyncio.sleep(seconds)
            self.running = None
            item.deliver()
        self._is_working = False


class EagerMerging(RoundMerging):
    """Never waits for the rounds of other coordinators: nothing can arrive while a virtual thread waits."""

    def patience(self, first: Round) -> float:
        return 0.0


class Registry:
    """Collects the handlers of services, in place of a server."""

    def __init__(self) -> None:
        self.handlers: Handlers = {}

    def add_generic_rpc_handlers(self, handlers: Any) -> None:
        """The registered handlers suffice."""

    def add_registered_method_handlers(self, service: str, handlers: Handlers) -> None:
        self.handlers.update({f"/{service}/{name}": handler for name, handler in handlers.items()})


class Life:
    """A worker process from its start to its end."""

    def __init__(self, worker: "Worker", slots: int) -> None:
        self._worker, self._loop = worker, worker.network.loop
        self._tasks: dict[asyncio.Task[None], None] = {}
        self.host = WorkerHost(lambda report: self._load(slots))
        self.thread = VirtualThread(self._loop, self._spawn)
        self.host._thread, self.host._merging = self.thread, EagerMerging(lambda: self._loop.now)  # type: ignore[assignment]
        self._health = health.aio.HealthServicer()
        registry = Registry()
        health_pb2_grpc.add_HealthServicer_to_server(self._health, registry)
        worker.register(self.host, registry)
        self.handlers = registry.handlers
        self._spawn(self._serve())

    @property
    def engines(self) -> list[ToyEngine]:
        """The worker's engine, and that of the draft that it carries. Empty while the model loads."""
        backends = [self.host.backend, self.host.backend.carried_draft] if self.host.is_loaded else []
        return [backend.engine for backend in backends if backend is not None]

    def kill(self) -> None:
        """End the process."""
        for task in list(self._tasks):
            task.cancel()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(work)
        self._tasks[task] = None
        task.add_done_callback(self._tasks.pop)

    def _load(self, slots: int) -> Any:
        self._spend(LOAD_SECONDS)
        setup = self._worker.setup
        engines = [self._engine(setup, slots)]
        engines[0].weights = self._worker.next_weights()
        if setup.draft is not None:
            engines.append(self._engine(setup.draft, setup.draft.slots))
        return self._worker.backend(*engines)

    def _engine(self, setup: WorkerSetup, slots: int) -> ToyEngine:
        columns = max(setup.max_model_len, setup.columns * slots // setup.slots)
        return ToyEngine(slots, setup.max_model_len, columns, setup.device, setup.pass_seconds, self._spend)

    def _spend(self, seconds: float) -> None:
        self._loop.lead += seconds

    async def _serve(self) -> None:
        await self._set_serving(False)
        await self.host.load()
        await self._set_serving(True)
        self._spawn(self.host.expire_leases(LEASE_SECONDS))
        self._spawn(self.host.watch(WATCHDOG_SECONDS, self._hang_changed))

    def _hang_changed(self, hangs: bool) -> None:
        self._spawn(self._set_serving(not hangs))
        if hangs:
            self._loop.call_later(WATCHDOG_SECONDS, self._end_hung)

    def _end_hung(self) -> None:
        if self.host.hanging is not None and self._worker.life is self:
            self._worker.crash(0.5)

    async def _set_serving(self, serving: bool) -> None:
        status = health_pb2.HealthCheckResponse
        await self._health.set("", status.SERVING if serving else status.NOT_SERVING)


class Worker:
    """A worker at an address. It lives several times."""

    def __init__(self, setup: WorkerSetup, pair: ToyPair, network: Network, rng: random.Random) -> None:
        self.setup, self.network = setup, network
        self.life: Life | None = None
        self.former_id = "before the simulation"
        """Instance id of the last life that has ended."""
        self.tampering = Tampering(self, rng)
        self._pair = pair if setup.agreement is None else replace(pair, agreement=setup.agreement)
        self._slots, self._lives = setup.slots, -1
        self._restart: asyncio.TimerHandle | None = None

    @property
    def is_target(self) -> bool:
        return self.setup.role == "target"

    def next_weights(self) -> str:
        """Begin the next life, and return the fingerprint of its weights."""
        self._lives += 1
        return self.setup.weights[self._lives % len(self.setup.weights)]

    def start(self) -> None:
        """Begin a life."""
        self._restart = None
        self.life = Life(self, self._slots)
        self.network[self.setup.address].handlers = self.life.handlers

    def crash(self, down_seconds: float, slots: int | None = None) -> None:
        """Kill the process, and start it again later, perhaps with other slots."""
        self._slots = slots or self._slots
        self.network[self.setup.address].handlers = None
        self.network.cut(self.setup.address)
        if self.life is not None:
            self.former_id = self.life.host.instance_id
            self.life.kill()
            self.life = None
        if self._restart is not None:
            self._restart.cancel()
        self._restart = self.network.loop.call_later(down_seconds, self.start)

    def stop(self) -> None:
        """End for good."""
        if self._restart is not None:
            self._restart.cancel()
        if self.life is not None:
            self.life.kill()

    def forget(self) -> bool:
        """Lose all caches. Return whether there were any."""
        for engine in self.engines:
            engine.forget()
        return bool(self.engines)

    def forget_draft(self) -> bool:
        """Lose the caches of the draft that the worker carries. Return whether there were any."""
        for engine in self.engines[1:]:
            engine.forget()
        return len(self.engines) > 1

    @property
    def engines(self) -> list[ToyEngine]:
        """Empty while the worker is down or loads its model."""
        return [] if self.life is None else self.life.engines

    def backend(self, *engines: ToyEngine) -> ToyVerifier | ToyProposer:
        """`engines`: of the worker, and of the draft that it carries."""
        return (
            ToyVerifier(engines[0], self._pair, *engines[1:]) if self.is_target else ToyProposer(*engines, self._pair)
        )

    def register(self, host: WorkerHost, registry: Registry) -> None:
        """Register the worker's service."""
        if self.is_target:
            servicer = _tampered(TargetWorkerServicer, host, self.tampering)
            target_worker_pb2_grpc.add_TargetWorkerServiceServicer_to_server(servicer, registry)
        else:
            servicer = _tampered(DraftWorkerServicer, host, self.tampering)
            draft_worker_pb2_grpc.add_DraftWorkerServiceServicer_to_server(servicer, registry)


def _tampered(kind: Any, host: WorkerHost, tampering: Tampering) -> Any:
    """A servicer whose answers to rounds pass through `tampering`."""

    class Servicer(kind):  # type: ignore[misc]
        async def round(self, request: Any) -> Any:
            return await tampering.answer(request, super().round)

    return Servicer(host)
