"""A complete service in one process: real engines, real servers, real sockets."""

import asyncio
import math
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from local_prompts import local_pool
from mixes import branches_only

from coordinator.config.settings import CoordinatorSettings
from coordinator.prompts.tokenizer_pool import TokenizerPool
from coordinator.server import CoordinatorServer
from coordinator.workers.draft_link import DraftLink
from draft_worker.server import DraftWorkerServicer, DraftWorkerSettings, load_proposer
from specpool.client import AsyncClient
from specpool.engine.cache.spans import Span
from specpool.engine.run.engine import Engine
from specpool.rpc.security.channel import MAX_ROUND_BYTES
from specpool.rpc.server.server import Server
from specpool.v1 import draft_worker_pb2_grpc, target_worker_pb2_grpc
from specpool.worker.host import WorkerHost
from target_worker.server import TargetWorkerServicer, TargetWorkerSettings, load_verifier

ARRANGEMENTS = ["chosen drafts", "branches", "carried draft"]
"""A draft worker whose drafts the coordinator chooses, one that drafts only branches, and a carried draft."""


class LogitsTap:
    """Monitors an engine: the logits after one context must have the same bits in every batch."""

    def __init__(self, engine: Engine, seen: dict[tuple[int, ...], bytes] | None = None) -> None:
        """`seen`: logits of another engine's tap, to compare with."""
        self.seen = {} if seen is None else seen
        self.compared = 0
        self.different: list[tuple[int, ...]] = []
        self._engine, self._forward = engine, engine.forward
        engine.forward = self._watch  # type: ignore[method-assign]

    def _watch(self, spans: list[Span]) -> torch.Tensor:
        logits = self._forward(spans)
        rows, slots = iter(logits), {slot.index: slot for slot in self._engine.slots._slots.values()}
        for span in spans:
            tokens = slots[span.slot].token_ids[: span.start] + list(span.token_ids)
            assert len(tokens) == span.end, "a span does not begin where the cache ends"
            for i in range(span.num_logits):
                self._compare(tuple(tokens[: span.end - span.num_logits + 1 + i]), next(rows))
        return logits

    def _compare(self, context: tuple[int, ...], row: torch.Tensor) -> None:
        bits = row.numpy().tobytes()
        if context in self.seen:
            self.compared += 1
            if self.seen[context] != bits:
                self.different.append(context)
        self.seen[context] = bits


@dataclass
class PairService:
    """A running service."""

    client: AsyncClient
    process: CoordinatorServer
    target: WorkerHost
    draft: WorkerHost | None

    @property
    def draft_link(self) -> DraftLink:
        """The link to the draft worker."""
        assert self.process.coordinator.lanes.first.draft is not None
        return self.process.coordinator.lanes.first.draft.links[0]

    async def forget(self, host: WorkerHost) -> None:
        """Make a worker lose every cache, like a restart."""
        await host.run(lambda backend: backend.expire(math.inf, 0.0))
        await host.run(lambda backend: backend.engine.slots.tables.pool.clear())
        await host.run(lambda backend: backend.carried_draft and backend.carried_draft.engine.slots.tables.pool.clear())

    async def forget_after(self, hundredths: list[int]) -> None:
        """Make all workers lose all caches, after pauses in hundredths of a second."""
        for pause in hundredths:
            await asyncio.sleep(pause / 100)
            for host in (self.target, self.draft):
                if host is not None:
                    await self.forget(host)

    async def wait_idle(self) -> None:
        """Wait until neither model holds a slot and the window is empty."""
        while True:
            infos = [await host.run(lambda b: b.info()) for host in (self.target, self.draft) if host]
            holds = [info.slots_in_use for each in infos for info in (each, each.draft) if info is not None]
            coordinator = self.process.coordinator
            if not any(holds) and coordinator.queue.is_empty and not coordinator.lanes.first.window.occupied:
                return
            await asyncio.sleep(0.01)


@asynccontextmanager
async def serving_pair(
    target: Path,
    draft: Path | None,
    worker: dict[str, Any] | None = None,
    target_worker: dict[str, Any] | None = None,
    **settings: Any,
) -> AsyncIterator[PairService]:
    """Run workers with `worker` settings, and a coordinator. `target_worker`: further settings of the target."""
    async with AsyncExitStack() as stack:
        options = {"threads": 2, "port": 0, "startup_cache": False, **(worker or {})}
        target_settings = TargetWorkerSettings(model=str(target), **{**options, **(target_worker or {})})
        target_host = WorkerHost(partial(load_verifier, target_settings))
        register = target_worker_pb2_grpc.add_TargetWorkerServiceServicer_to_server
        address = await _serve(stack, target_settings, target_host, register, TargetWorkerServicer(target_host))
        draft_host = draft_address = None
        if draft is not None:
            draft_address, draft_host = await stack.enter_async_context(serving_draft(draft, **options))
        client, process = await stack.enter_async_context(serving_coordinator(address, draft_address, **settings))
        yield PairService(client, process, target_host, draft_host)


@contextmanager
def running_pair(target: Path, draft: Path | None, **options: Any) -> Iterator[tuple[asyncio.Runner, PairService]]:
    """`serving_pair` for several tests, and the runner of its event loop."""
    with asyncio.Runner() as runner:
        context = serving_pair(target, draft, **options)
        yield runner, runner.run(context.__aenter__())
        runner.run(context.__aexit__(None, None, None))


@contextmanager
def running_arrangement(
    arrangement: str, target: Path, draft: Path, **options: Any
) -> Iterator[tuple[asyncio.Runner, PairService]]:
    """`running_pair` in one of `ARRANGEMENTS`."""
    is_carried = arrangement == "carried draft"
    carried = {"target_worker": {"draft": str(draft)}} if is_carried else {}
    with (
        branches_only() if arrangement == "branches" else nullcontext(),
        running_pair(target, None if is_carried else draft, **carried, **options) as running,
    ):
        yield running


@asynccontextmanager
async def serving_draft(model: Path, **settings: Any) -> AsyncIterator[tuple[str, WorkerHost]]:
    """Run a draft worker with these settings; yield its address and host."""
    async with AsyncExitStack() as stack:
        draft = DraftWorkerSettings(model=str(model), **{"startup_cache": False, **settings})
        host = WorkerHost(partial(load_proposer, draft))
        register = draft_worker_pb2_grpc.add_DraftWorkerServiceServicer_to_server
        yield await _serve(stack, draft, host, register, DraftWorkerServicer(host)), host


@asynccontextmanager
async def serving_coordinator(
    target: str, draft: str | None, new_pool: Callable[[int], TokenizerPool] = local_pool, **settings: Any
) -> AsyncIterator[tuple[AsyncClient, CoordinatorServer]]:
    """Run a coordinator for these workers until it is ready to generate."""
    settings = {"port": 0, "drain_seconds": 0, "target_address": target, "draft_address": draft, **settings}
    async with AsyncExitStack() as stack:
        process = CoordinatorServer(CoordinatorSettings(**settings), new_pool)
        port = await process.start()
        stack.push_async_callback(process.wait_stopped)
        stack.callback(process.server.stop)
        await process.coordinator.target.wait_ready()
        if process.coordinator.lanes.first.draft is not None:
            await process.coordinator.lanes.first.draft.links[0].wait_ready()
        yield await stack.enter_async_context(AsyncClient(f"127.0.0.1:{port}")), process


async def _serve(stack: AsyncExitStack, settings: Any, host: WorkerHost, register: Any, servicer: Any) -> str:
    server = Server(settings, MAX_ROUND_BYTES)
    server.add(servicer.__class__.__name__, register, servicer)
    port = await server.start()
    await host.load()
    server.set_serving(True)
    stack.callback(host.close)
    stack.push_async_callback(server.wait_stopped)
    stack.callback(server.stop)
    return f"127.0.0.1:{port}"
