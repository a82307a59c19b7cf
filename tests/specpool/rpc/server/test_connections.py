"""Connections of strangers and of clients with too many, over real sockets."""

import asyncio
import logging
import socket
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import grpc
import pytest
from call_service import Calls, calls_server
from certificates import OTHER_TOKEN, TOKEN, Authority, Certificate
from framings import DATA, END_HEADERS, END_STREAM, HEADERS, PREFACE, RST_STREAM, SETTINGS, WINDOW_UPDATE, block, frame
from grpc_health.v1 import health_pb2, health_pb2_grpc
from secure_service import until
from serving import free_address

from specpool.rpc.security.channel import Connector
from specpool.rpc.server import connections, guard, sockets, watch
from specpool.rpc.server.connections import MAX_METADATA_BYTES, ConnectionLimits

BEGUN = PREFACE + frame(SETTINGS, 0, 0) + frame(SETTINGS, 1, 0)
ONE = {b":path": b"/calls/One"}
WITH_TOKEN = {b"authorization": b"Bearer " + TOKEN.encode()}
Stream = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("tokens") / "tokens"
    file.write_text(f"alice {TOKEN}\nbob {OTHER_TOKEN}\n")
    return file


@pytest.fixture(scope="module")
def certificate(ca: Authority) -> Certificate:
    return ca.issue("server")


@asynccontextmanager
async def running(**settings: Any) -> AsyncIterator[tuple[Calls, str]]:
    async with calls_server(**settings) as (_, calls, address):
        calls.open.set()
        yield calls, address


@asynccontextmanager
async def connected(address: str) -> AsyncIterator[Stream]:
    host, _, port = address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        yield reader, writer
    finally:
        writer.close()


async def until_closed(reader: asyncio.StreamReader) -> None:
    with suppress(ConnectionError):
        while await reader.read(2**16):
            pass


async def call(address: str, token: str | None = TOKEN, **security: Any) -> bytes:
    """Call on a new connection."""
    async with Connector(address, token=token, **security).open() as channel:
        response: bytes = await channel.unary_unary("/calls/One")(b"a")
        return response


def calls(numbers: Iterator[int], fields: dict[bytes, bytes], end: bytes = b"") -> bytes:
    """Frames of calls with an empty message, or of calls that are reset."""
    body = (HEADERS, END_HEADERS), block(ONE | fields)
    frames = []
    for number in numbers:
        frames.append(frame(*body[0], number, body[1]))
        frames.append(frame(RST_STREAM, 0, number, end) if end else frame(DATA, END_STREAM, number, bytes(5)))
    return b"".join(frames)


# --- Strangers


@pytest.mark.parametrize("path", [b"/calls/\xff\xfe", b"/grpc.health.v1.Health/\xff", b"\xff"])
async def test_paths_that_are_not_utf8_do_not_end_the_server(path: bytes, caplog: pytest.LogCaptureFixture) -> None:
    health_address = free_address()
    async with running(health_port=int(health_address.rpartition(":")[2])) as (_, address):
        for each in (address, health_address):
            async with connected(each) as (reader, writer):
                fields = frame(HEADERS, END_HEADERS | END_STREAM, 1, block({b":path": path}))
                writer.write(BEGUN + fields)
                await reader.readuntil(b"Method not found!")
        assert await call(address) == b"a"
        assert await is_healthy(health_address)
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []


async def is_healthy(address: str) -> bool:
    async with grpc.aio.insecure_channel(address) as channel:
        response = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(service="live"))
        return bool(response.status == health_pb2.HealthCheckResponse.SERVING)


@pytest.mark.parametrize("has_tls", [False, True])
async def test_silent_connections_keep_no_client_out(
    ca: Authority, certificate: Certificate, tokens: Path, has_tls: bool
) -> None:
    """300 of them, where 256 connections are allowed, opened again whenever they are closed."""
    security = certificate.options if has_tls else {}
    async with running(max_connections=256, api_tokens=tokens, **security) as (_, address), silent(address, 300):
        for _ in range(10):
            await asyncio.sleep(0.1)
            assert await call(address, **({"tls_ca": ca.path} if has_tls else {})) == b"a"


async def test_looks_follow_each_other_while_strangers_fill_the_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many connections take long to look at. The room must not fill again until the next look."""
    looks = 0

    def slowly() -> list[int]:
        nonlocal looks
        looks += 1
        time.sleep(0.2)
        return sockets.descriptors()

    monkeypatch.setattr(watch, "descriptors", slowly)
    async with running(max_connections=64) as (_, address), silent(address, 100):
        await until(lambda: looks == 10)


@asynccontextmanager
async def silent(address: str, count: int) -> AsyncIterator[None]:
    """Hold connections open that send nothing, and open new ones whenever they are closed."""

    async def stay() -> None:
        while True:
            async with connected(address) as (reader, _):
                await until_closed(reader)

    tasks = [asyncio.create_task(stay()) for _ in range(count)]
    try:
        yield
    finally:
        for each in tasks:
            each.cancel()


@pytest.mark.skipif(not hasattr(socket, "AF_NETLINK"), reason="only Linux has netlink sockets")
async def test_sockets_of_other_families_are_no_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    """Libraries of network cards keep such sockets open. Their addresses are numbers."""
    monkeypatch.setattr(guard, "FIRST_CALL_SECONDS", 0.2)
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW) as other:
        other.bind((0, 0))
        async with running() as (_, address), connected(address) as (reader, writer):
            writer.write(BEGUN)
            await until_closed(reader)


async def test_connections_without_a_call_are_closed(monkeypatch: pytest.MonkeyPatch, tokens: Path) -> None:
    monkeypatch.setattr(guard, "FIRST_CALL_SECONDS", 0.5)
    async with running(api_tokens=tokens) as (_, address), AsyncExitStack() as stack:
        client, probe = [await stack.enter_async_context(channel_to(address)) for _ in range(2)]
        known = [client.unary_unary("/calls/One")(b"a", metadata=bearing(TOKEN)), check(probe)]
        await asyncio.gather(*known)
        states = [client.get_state(), probe.get_state()]
        for greeting in (b"", BEGUN, BEGUN + calls(iter([1]), {})):
            async with connected(address) as (reader, writer):
                writer.write(greeting)
                await until_closed(reader)
        assert [client.get_state(), probe.get_state()] == states == [grpc.ChannelConnectivity.READY] * 2


def channel_to(address: str) -> grpc.aio.Channel:
    return grpc.aio.insecure_channel(address, options=[("grpc.use_local_subchannel_pool", 1)])


def bearing(token: str) -> tuple[tuple[str, str], ...]:
    return (("authorization", f"Bearer {token}"),)


async def check(channel: grpc.aio.Channel) -> Any:
    return await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(service="live"))


@pytest.mark.skipif(sys.platform != "linux", reason="other systems do not count the bytes of a connection")
async def test_strangers_may_send_little(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guard, "MAX_STRANGER_BYTES", 2**12)
    monkeypatch.setattr(guard, "STRANGER_BYTES_PER_SECOND", 0)
    async with running() as (_, address), connected(address) as (reader, writer):
        writer.write(BEGUN + frame(WINDOW_UPDATE, 0, 0, b"\0\0\0\1") * 400)
        await until_closed(reader)
        assert await call(address) == b"a"


async def test_connections_of_which_many_calls_are_refused_are_closed(
    monkeypatch: pytest.MonkeyPatch, tokens: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(guard, "REFUSED_BURST", 10)
    monkeypatch.setattr(guard, "REFUSED_PER_SECOND", 0)
    async with running(api_tokens=tokens) as (_, address), channel_to(address) as client:
        assert await client.unary_unary("/calls/One")(b"a", metadata=bearing(TOKEN)) == b"a"
        for _ in range(3):  # a new connection gets no new allowance
            async with connected(address) as (reader, writer):
                writer.write(BEGUN + calls(iter(range(1, 41, 2)), {}))
                await until_closed(reader)
        assert await is_healthy(address), "probes make few calls"
        assert await client.unary_unary("/calls/One")(b"a", metadata=bearing(TOKEN)) == b"a"
        assert await call(address) == b"a", "from the same host"
    logged = [record.getMessage() for record in caplog.records if "closed" in record.getMessage()]
    assert logged == ["closed 1 connections: 1 were refused too often"], "one line a minute"


async def test_calls_of_unknown_methods_count_as_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The health port needs no credentials."""
    monkeypatch.setattr(guard, "REFUSED_BURST", 10)
    monkeypatch.setattr(guard, "REFUSED_PER_SECOND", 0)
    health_address = free_address()
    async with running(health_port=int(health_address.rpartition(":")[2])) as (_, address):
        for each in (health_address, address):
            async with connected(each) as (reader, writer):
                writer.write(BEGUN + calls(iter(range(1, 41, 2)), {b":path": b"/calls/Unknown"}))
                await until_closed(reader)
        assert await is_healthy(health_address)
        assert await call(address) == b"a"


async def test_large_metadata_is_refused_before_it_is_read(tokens: Path) -> None:
    async with running(api_tokens=tokens) as (served, address), channel_to(address) as client:
        for size, code in ((MAX_METADATA_BYTES // 2, None), (MAX_METADATA_BYTES, grpc.StatusCode.RESOURCE_EXHAUSTED)):
            metadata = (*bearing(TOKEN), ("x-large", "x" * size))
            sent = client.unary_unary("/calls/One")(b"a", metadata=metadata)
            assert await sent.code() is (code or grpc.StatusCode.OK)
        assert served.begun == 1


# --- Clients


async def test_clients_that_reset_many_calls_lose_their_connection(
    monkeypatch: pytest.MonkeyPatch, tokens: Path
) -> None:
    monkeypatch.setattr(guard, "RESET_BURST", 50)
    monkeypatch.setattr(guard, "RESETS_PER_SECOND", 0)
    async with running(api_tokens=tokens) as (served, address), channel_to(address) as client:
        served.open.clear()
        # Well-behaved clients cancel calls too.
        cancelled = [client.unary_unary("/calls/One")(b"a", metadata=bearing(OTHER_TOKEN)) for _ in range(40)]
        await until(lambda: served.begun == 40)
        for each in cancelled:
            each.cancel()
        async with connected(address) as (reader, writer):
            resets = calls(iter(range(1, 2001, 2)), WITH_TOKEN, end=b"\0\0\0\x08")
            writer.write(BEGUN + resets)
            await until_closed(reader)
        served.open.set()
        assert client.get_state() is grpc.ChannelConnectivity.READY
        assert await call(address) == b"a"


async def test_clients_with_too_many_connections_lose_idle_ones(tokens: Path) -> None:
    async with running(max_connections=3, api_tokens=tokens) as (served, address), AsyncExitStack() as stack:
        channels = [await stack.enter_async_context(channel_to(address)) for _ in range(6)]
        methods = [channel.unary_unary("/calls/One") for channel in channels]
        other = methods.pop()
        assert await other(b"a", metadata=bearing(OTHER_TOKEN)) == b"a"
        served.open.clear()
        busy = asyncio.ensure_future(methods.pop()(b"busy", metadata=bearing(TOKEN)))
        await until(lambda: served.begun == 2)
        served.open.set()
        for method in methods:
            assert await method(b"a", metadata=bearing(TOKEN)) == b"a"
        await until(lambda: sum(is_open(channel) for channel in channels) == 3)
        assert is_open(channels[5]), "the other client has only one"
        for method in methods:  # clients connect again by themselves
            assert await method(b"a", metadata=bearing(TOKEN), wait_for_ready=True) == b"a"
        assert await busy == b"busy"


def is_open(channel: grpc.aio.Channel) -> bool:
    return channel.get_state() is grpc.ChannelConnectivity.READY


async def test_calls_in_progress_keep_their_connection(tokens: Path) -> None:
    async with running(max_connections=1, api_tokens=tokens) as (served, address), AsyncExitStack() as stack:
        served.open.clear()
        busy_channel, *idle = [await stack.enter_async_context(channel_to(address)) for _ in range(4)]
        busy = asyncio.ensure_future(busy_channel.unary_unary("/calls/One")(b"busy", metadata=bearing(TOKEN)))
        await until(lambda: served.begun == 1)
        for channel in idle:
            refused = channel.unary_unary("/calls/Refuse")(b"a", metadata=bearing(TOKEN))
            assert await refused.code() is grpc.StatusCode.INVALID_ARGUMENT
        await until(lambda: not any(map(is_open, idle)))
        served.open.set()
        assert await busy == b"busy"


async def test_health_port_works_during_connection_floods() -> None:
    health_address = free_address()
    health_port = int(health_address.rpartition(":")[2])
    async with running(health_port=health_port, max_connections=2) as (_, address), AsyncExitStack() as stack:
        for _ in range(100):
            with suppress(ConnectionError):
                await stack.enter_async_context(connected(address))
        assert await is_healthy(health_address)
        async with channel_to(health_address) as own:
            assert await own.unary_unary("/calls/One")(b"a").code() is grpc.StatusCode.UNIMPLEMENTED


# --- Descriptors


@pytest.mark.parametrize(
    ("soft", "hard", "raised", "clients", "newcomers"),
    [
        (256, 4096, 2128, 1000, 1000),
        (256, 512, 512, 288, 96),
        (1500, 1500, 1500, 1000, 372),
        (4000, 4000, None, 1000, 1000),
        (1, 1, 1, 1, 1),
        (-1, -1, None, 1000, 1000),
    ],
)
def test_file_descriptor_limit_bounds_connections(
    monkeypatch: pytest.MonkeyPatch, soft: int, hard: int, raised: int | None, clients: int, newcomers: int
) -> None:
    set_limits: list[int] = []
    monkeypatch.setattr(connections.resource, "setrlimit", lambda _, both: set_limits.append(both[0]))
    monkeypatch.setattr(connections.resource, "getrlimit", lambda _: (soft, hard))
    assert ConnectionLimits.of(connections.ServerSettings(max_connections=1000)) == ConnectionLimits(clients, newcomers)
    assert set_limits == ([] if raised is None else [raised])
