"""Limits of gRPC on connections and metadata, over real sockets."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import grpc
import pytest
from call_service import Calls, calls_server

from specpool.rpc.server import connections
from specpool.rpc.server.connections import MAX_METADATA_BYTES, max_connections


@asynccontextmanager
async def running(**settings: Any) -> AsyncIterator[tuple[Calls, str]]:
    async with calls_server(**settings) as (_, calls, address):
        calls.open.set()
        yield calls, address


def channel_to(address: str) -> grpc.aio.Channel:
    return grpc.aio.insecure_channel(address, options=[("grpc.use_local_subchannel_pool", 1)])


async def test_large_metadata_is_refused_before_it_is_read() -> None:
    async with running() as (served, address), channel_to(address) as client:
        for size, code in ((MAX_METADATA_BYTES // 2, None), (MAX_METADATA_BYTES, grpc.StatusCode.RESOURCE_EXHAUSTED)):
            sent = client.unary_unary("/calls/One")(b"a", metadata=[("x-large", "x" * size)])
            assert await sent.code() is (code or grpc.StatusCode.OK)
        assert served.begun == 1


async def test_connections_beyond_the_maximum_are_closed() -> None:
    async with running(max_connections=2) as (_, address), AsyncExitStack() as stack:
        for _ in range(2):
            channel = await stack.enter_async_context(channel_to(address))
            assert await channel.unary_unary("/calls/One")(b"a") == b"a"
        host, _, port = address.rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        assert await reader.read() == b""
        writer.close()
        assert await channel.unary_unary("/calls/One")(b"a") == b"a"


@pytest.mark.parametrize(
    ("soft", "hard", "raised", "allowed"),
    [
        (256, 4096, 1128, 1000),
        (256, 512, 512, 384),
        (1128, 1128, None, 1000),
        (1, 1, 1, 1),
        (-1, -1, None, 1000),
    ],
)
def test_file_descriptor_limit_bounds_connections(
    monkeypatch: pytest.MonkeyPatch, soft: int, hard: int, raised: int | None, allowed: int
) -> None:
    set_limits: list[int] = []
    monkeypatch.setattr(connections.resource, "setrlimit", lambda _, both: set_limits.append(both[0]))
    monkeypatch.setattr(connections.resource, "getrlimit", lambda _: (soft, hard))
    assert max_connections(1000) == allowed
    assert set_limits == ([] if raised is None else [raised])
