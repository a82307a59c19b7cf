"""A coordinator and fake workers behind real servers, with security settings."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any

from local_prompts import local_pool
from serving import DEFAULTS, PATIENCE_SECONDS

from coordinator.config.settings import CoordinatorSettings
from coordinator.server import CoordinatorServer
from coordinator.workers.link import WorkerLink
from specpool.rpc.config.settings import ServerSettings
from specpool.rpc.security.channel import MAX_ROUND_BYTES
from specpool.rpc.server.server import Server
from specpool.testing import FakeDraft, FakeTarget
from specpool.v1 import draft_worker_pb2_grpc, target_worker_pb2_grpc


@dataclass
class SecureService:
    """A running coordinator and its address."""

    process: CoordinatorServer
    address: str
    target: FakeTarget

    @property
    def links(self) -> list[WorkerLink]:
        """Return the links to both workers."""
        assert self.process.coordinator.lanes.first.draft is not None
        return [self.process.coordinator.target, *self.process.coordinator.lanes.first.draft.links]

    async def until_ready(self) -> None:
        await until(lambda: all(link.is_ready for link in self.links))


async def until(holds: Callable[[], object]) -> None:
    """Wait until a condition holds."""
    async with asyncio.timeout(PATIENCE_SECONDS):
        while not holds():  # noqa: ASYNC110 - links have no event for it
            await asyncio.sleep(0.02)


@asynccontextmanager
async def listening(server: Server) -> AsyncIterator[str]:
    """Run a server; yield its address."""
    address = f"127.0.0.1:{await server.start()}"
    server.set_serving(True)
    try:
        yield address
    finally:
        server.stop(drain=False)
        await server.wait_stopped()


@asynccontextmanager
async def worker(fake: FakeTarget | FakeDraft, port: int = 0, **security: Any) -> AsyncIterator[str]:
    """Run a fake worker behind a server with these settings; yield its address."""
    server = Server(ServerSettings(port=port, **security), MAX_ROUND_BYTES)
    if isinstance(fake, FakeTarget):
        register: Any = target_worker_pb2_grpc.add_TargetWorkerServiceServicer_to_server
        server.add("specpool.v1.TargetWorkerService", register, fake)
    else:
        register = draft_worker_pb2_grpc.add_DraftWorkerServiceServicer_to_server
        server.add("specpool.v1.DraftWorkerService", register, fake)
    async with listening(server) as address:
        yield address


@asynccontextmanager
async def coordinator(
    target: FakeTarget, target_address: str, draft_address: str, **settings: Any
) -> AsyncIterator[SecureService]:
    """Run a coordinator; it may not have reached its workers yet."""
    addresses = {"target_address": target_address, "draft_address": draft_address}
    process = CoordinatorServer(CoordinatorSettings(**{**DEFAULTS, **addresses, **settings}), local_pool)
    address = f"127.0.0.1:{await process.start()}"
    try:
        yield SecureService(process, address, target)
    finally:
        process.server.stop(drain=False)
        await process.wait_stopped()


@asynccontextmanager
async def secure_service(worker_settings: dict[str, Any], **settings: Any) -> AsyncIterator[SecureService]:
    """Run both fake workers with the same settings, and a coordinator with others."""
    target = FakeTarget()
    async with AsyncExitStack() as stack:
        addresses = [
            await stack.enter_async_context(worker(fake, **worker_settings)) for fake in (target, FakeDraft(target))
        ]
        yield await stack.enter_async_context(coordinator(target, *addresses, **settings))
