"""A worker that serves in this process over a real socket, and a coordinator's calls to it."""

import asyncio
import itertools
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2, status_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from tiny_models import forget_all

from draft_worker.server import DraftWorkerServicer
from draft_worker.translating import TranslatingProposer
from specpool.engine.cache.spans import Span
from specpool.engine.run.engine import Engine
from specpool.rpc.config.settings import ServerSettings
from specpool.rpc.security.channel import MAX_ROUND_BYTES
from specpool.rpc.server.server import Server
from specpool.v1 import common_pb2, draft_worker_pb2, draft_worker_pb2_grpc, target_worker_pb2, target_worker_pb2_grpc
from specpool.worker.host import WorkerHost
from specpool.worker.process import _serve
from specpool.worker.servicer import WorkerServicer
from specpool.worker.settings import WorkerSettings
from target_worker.server import TargetWorkerServicer
from target_worker.verifier import Verifier

SLOTS = 3
TRUTH_SLOT = 7
"""A slot of the arena outside the tests' slot table."""
PATIENCE_SECONDS = 60

OK = common_pb2.ITEM_STATUS_OK
CACHE_MISS = common_pb2.ITEM_STATUS_CACHE_MISS
NO_SLOT = common_pb2.ITEM_STATUS_NO_SLOT
STALE_ROUND = common_pb2.ITEM_STATUS_STALE_ROUND


@dataclass(frozen=True)
class Role:
    """The differences between the two workers."""

    name: str
    backend: Callable[[Engine], Any]
    servicer: Callable[[WorkerHost], WorkerServicer]
    register: Callable[..., None]
    stub: Callable[[grpc.aio.Channel], Any]


DRAFT = Role(
    "DraftWorkerService",
    TranslatingProposer,
    DraftWorkerServicer,
    draft_worker_pb2_grpc.add_DraftWorkerServiceServicer_to_server,
    draft_worker_pb2_grpc.DraftWorkerServiceStub,
)
TARGET = Role(
    "TargetWorkerService",
    Verifier,
    TargetWorkerServicer,
    target_worker_pb2_grpc.add_TargetWorkerServiceServicer_to_server,
    target_worker_pb2_grpc.TargetWorkerServiceStub,
)


@dataclass
class Worker:
    """A worker in this process, and a coordinator's calls to it."""

    role: Role
    host: WorkerHost
    channel: grpc.aio.Channel
    engine: Engine
    address: str = ""

    def __post_init__(self) -> None:
        self.stub = self.role.stub(self.channel)
        self.rounds = itertools.count(1)

    async def round(self, *items: Any, **fields: Any) -> list[Any]:
        """Results of one round, by default the next one. `fields`: see `request`."""
        return list((await self.respond(*items, **fields)).results)

    async def respond(self, *items: Any, **fields: Any) -> Any:
        request = self.request(*items, **fields)
        return await (self.stub.Propose if self.role is DRAFT else self.stub.Verify)(request)

    def request(self, *items: Any, coordinator_id: str = "c", round_id: int | None = None, **fields: Any) -> Any:
        kind = draft_worker_pb2.ProposeRequest if self.role is DRAFT else target_worker_pb2.VerifyRequest
        number = next(self.rounds) if round_id is None else round_id
        return kind(coordinator_id=coordinator_id, round_id=number, items=items, **fields)

    def open_stream(self) -> Any:
        return (self.stub.ProposeStream if self.role is DRAFT else self.stub.VerifyStream)()

    def item(self, sequence_id: int, base_length: int, token_ids: Sequence[int]) -> Any:
        """An item for either role: append tokens, and return one more token."""
        if self.role is DRAFT:
            return propose(sequence_id, base_length, token_ids, 1)
        return verify(sequence_id, base_length, token_ids)

    async def release(self, *sequence_ids: int, coordinator_id: str = "c") -> int:
        request = common_pb2.ReleaseRequest(coordinator_id=coordinator_id, sequence_ids=sequence_ids)
        return (await self.stub.Release(request)).released

    async def info(self) -> common_pb2.GetWorkerInfoResponse:
        return await self.stub.GetWorkerInfo(common_pb2.GetWorkerInfoRequest())

    def cached(self, sequence_id: int, coordinator_id: str = "c") -> int:
        return self.engine.slots[coordinator_id, sequence_id].num_cached_tokens

    def continuation(self, prompt: Sequence[int], count: int) -> list[int]:
        """Tokens of plain decoding with this model: one at a time, alone in the batch."""
        tokens = list(prompt)
        for start in [0, *range(len(prompt), len(prompt) + count - 1)]:
            tokens += self.engine.forward([Span(TRUTH_SLOT, start, tokens[start:], 1)]).argmax(-1).tolist()
        return tokens[len(prompt) :]


def propose(sequence_id: int, base_length: int, token_ids: Sequence[int], k: int) -> draft_worker_pb2.ProposeItem:
    return draft_worker_pb2.ProposeItem(
        sequence_id=sequence_id, base_length=base_length, token_ids=token_ids, num_draft_tokens=k
    )


def verify(
    sequence_id: int,
    base_length: int,
    token_ids: Sequence[int],
    draft_token_ids: Sequence[int] = (),
    prefill_only: bool = False,
) -> target_worker_pb2.VerifyItem:
    return target_worker_pb2.VerifyItem(
        sequence_id=sequence_id,
        base_length=base_length,
        token_ids=token_ids,
        draft_token_ids=draft_token_ids,
        prefill_only=prefill_only,
    )


@asynccontextmanager
async def serving(role: Role, engine: Engine, **settings: Any) -> AsyncIterator[Worker]:
    """A loaded worker with empty slots."""
    forget_all(engine, SLOTS)
    host = WorkerHost(lambda report: role.backend(engine))
    server = Server(ServerSettings(**{"drain_seconds": 0, **settings}), MAX_ROUND_BYTES)
    server.add(f"specpool.v1.{role.name}", role.register, role.servicer(host))
    port = await server.start()
    await host.load()
    server.set_serving(True)
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        yield Worker(role, host, channel, engine, f"127.0.0.1:{port}")
    server.stop()
    await server.wait_stopped()
    host.close()
    engine.slots.check_integrity()


def tokens_of(result: Any) -> list[int]:
    return list(result.draft_token_ids if hasattr(result, "draft_token_ids") else result.token_ids)


async def failure(call: Any) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return caught.value


def violated_fields(error: grpc.aio.AioRpcError) -> list[str]:
    """Fields named by the machine-readable details of an error."""
    (payload,) = [value for key, value in error.trailing_metadata() if key == "grpc-status-details-bin"]
    bad_request = error_details_pb2.BadRequest()
    assert status_pb2.Status.FromString(payload).details[0].Unpack(bad_request)
    return [violation.field for violation in bad_request.field_violations]


@dataclass
class Process:
    """The life cycle of a worker process, run as a task in this process."""

    server: Server
    address: str
    task: asyncio.Task[None]


@asynccontextmanager
async def worker_process(
    role: Role, load: Callable[[Any], Any], monkeypatch: pytest.MonkeyPatch, **changes: Any
) -> AsyncIterator[Process]:
    started: asyncio.Future[tuple[Server, int]] = asyncio.get_running_loop().create_future()
    start = Server.start

    async def started_at(server: Server) -> int:
        port = await start(server)
        started.set_result((server, port))
        return port

    monkeypatch.setattr(Server, "start", started_at)
    host = WorkerHost(load)
    servicer = role.servicer(host)
    settings = WorkerSettings(**{"drain_seconds": PATIENCE_SECONDS, **changes})
    task = asyncio.create_task(
        _serve(settings, host, lambda server: server.add(f"specpool.v1.{role.name}", role.register, servicer))
    )
    server, port = await started
    yield Process(server, f"127.0.0.1:{port}", task)
    server.stop()
    await asyncio.wait([task])


async def wait_serving(channel: grpc.aio.Channel, service: str = "") -> None:
    async with asyncio.timeout(PATIENCE_SECONDS):
        watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(service=service))
        async for answer in watch:
            if answer.status == health_pb2.HealthCheckResponse.SERVING:
                break
        watch.cancel()


async def until(condition: Callable[[], Any]) -> None:
    """Wait until a condition on a worker in this process holds."""
    async with asyncio.timeout(PATIENCE_SECONDS):
        while not condition():  # noqa: ASYNC110 - the worker sends no notice
            await asyncio.sleep(0.005)


@dataclass
class Hold:
    """Blocked passes."""

    began: threading.Event = field(default_factory=threading.Event)
    """Set when a pass blocks."""
    open: threading.Event = field(default_factory=threading.Event)
    """Set to unblock all passes."""


@contextmanager
def held(worker: Worker) -> Iterator[Hold]:
    """Block passes until `Hold.open` is set or the context ends."""
    hold, forward = Hold(), worker.engine.forward

    def wait(spans: Any) -> Any:
        hold.began.set()
        assert hold.open.wait(PATIENCE_SECONDS)
        return forward(spans)

    worker.engine.forward = wait  # type: ignore[method-assign]
    try:
        yield hold
    finally:
        hold.open.set()
        del worker.engine.forward
