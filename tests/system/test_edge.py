"""The edge of `deploy/edge`: a real HAProxy before a server, over real sockets."""

import asyncio
import shutil
import signal
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import grpc
import pytest
from call_service import Calls, calls_server
from certificates import OTHER_TOKEN, TOKEN, Authority
from deaf_client import deaf_client
from edge import checked, edge, edge_process
from framings import END_HEADERS, END_STREAM, HEADERS, PREFACE, RST_STREAM, SETTINGS, block, frame
from relay import forward
from secure_service import until

from specpool.client.failures import failure
from specpool.errors import UnavailableError
from specpool.rpc.ports import free_port
from specpool.rpc.security.channel import Connector

IMPATIENT = {"header_seconds": "1", "idle_seconds": "1", "stalled_seconds": "1"}
FIRST_CALL = bytes([HEADERS, END_HEADERS, 0, 0, 0, 1]), bytes([RST_STREAM, 0, 0, 0, 0, 1])
"""In the frame that answers the first call, or resets it."""
BEGUN = PREFACE + frame(SETTINGS, 0, 0) + frame(SETTINGS, 1, 0)
Stream = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@asynccontextmanager
async def running(**variables: str) -> AsyncIterator[tuple[Calls, str]]:
    """Run a server behind an edge; yield its calls and the edge's address."""
    async with calls_server() as (_, calls, coordinator), edge(coordinator, **variables) as address:
        calls.open.set()
        yield calls, address


@asynccontextmanager
async def connected(address: str, source: str = "127.0.0.1") -> AsyncIterator[Stream]:
    host, _, port = address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port), local_addr=(source, 0))
    try:
        yield reader, writer
    finally:
        writer.close()


async def until_closed(reader: asyncio.StreamReader) -> None:
    with suppress(ConnectionError):
        while await reader.read(2**16):
            pass


async def refuses_connections(address: str, source: str = "127.0.0.1") -> None:
    with suppress(ConnectionError):
        async with connected(address, source) as (reader, _):
            await until_closed(reader)


async def call(address: str, **security: Path) -> bytes:
    """Call on a new connection."""
    async with Connector(address, **security).open() as channel:
        answer: bytes = await channel.unary_unary("/calls/One")(b"a", wait_for_ready=True)
        return answer


async def test_calls_and_their_errors_pass() -> None:
    async with running() as (_, address), Connector(address).open() as channel:
        assert await call(address) == b"a"
        assert [each async for each in channel.unary_stream("/calls/Stream")(b"b")] == [b"b"]
        refused = channel.unary_unary("/calls/Refuse")(b"c")
        assert await refused.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert await refused.details() == "field: c"


async def test_silent_connections_are_closed() -> None:
    """Connections that send nothing, a preface, or settings."""
    async with running(**IMPATIENT) as (_, address):

        async def send_only(greeting: bytes) -> None:
            async with connected(address) as (reader, writer):
                writer.write(greeting)
                await until_closed(reader)

        await asyncio.gather(*map(send_only, (b"", PREFACE, BEGUN)))


@pytest.mark.slow
async def test_quiet_calls_stay_open() -> None:
    """A queued request may wait for longer than any timeout of a client."""
    async with running(**IMPATIENT) as (calls, address):
        calls.open.clear()
        async with Connector(address).open() as channel:
            waiting = channel.unary_unary("/calls/One")(b"a")
            async with connected(address) as (reader, writer):
                writer.write(BEGUN)
                await until_closed(reader)
            await asyncio.sleep(1.5)  # longer than the timeouts
            calls.open.set()
            assert await waiting == b"a"


async def test_connections_of_a_source_are_limited() -> None:
    source = "127.0.0.2"  # the connection that has waited for the edge may still count for the usual address
    async with running(connections="2") as (_, address), AsyncExitStack() as stack:
        for _ in range(2):
            reader, writer = await stack.enter_async_context(connected(address, source))
            writer.write(BEGUN)
            assert await reader.read(1)  # its threads may accept connections in another order
        await refuses_connections(address, source)
        assert await call(address) == b"a"


async def test_both_families_are_served_and_their_sources_counted_apart() -> None:
    port = str(free_port())
    everywhere, source = f"[::]:{port}", "127.0.0.2"
    async with running(bind=everywhere, connections="2") as (_, _), AsyncExitStack() as stack:
        for _ in range(2):
            reader, writer = await stack.enter_async_context(connected(f"127.0.0.1:{port}", source))
            writer.write(BEGUN)
            assert await reader.read(1)
        await refuses_connections(f"127.0.0.1:{port}", source)
        assert await call(f"127.0.0.1:{port}") == b"a"
        assert await call(f"[::1]:{port}") == b"a"


async def test_calls_at_a_time_are_limited() -> None:
    async with running(calls="1") as (calls, address), Connector(address).open() as channel:
        calls.open.clear()
        method = channel.unary_unary("/calls/One")
        first = asyncio.ensure_future(method(b"a"))
        await until(lambda: calls.begun == 1)
        assert await method(b"b", timeout=0.5).code() is grpc.StatusCode.DEADLINE_EXCEEDED
        assert calls.begun == 1
        calls.open.set()
        assert await first == b"a"
        assert await call(address) == b"a"


async def test_calls_of_a_source_are_limited() -> None:
    async with running(call_rate="20") as (_, address), Connector(address).open() as channel:
        codes = await asyncio.gather(*(channel.unary_unary("/calls/One")(b"a").code() for _ in range(60)))
        assert set(codes) == {grpc.StatusCode.OK, grpc.StatusCode.UNAVAILABLE}
        assert codes.count(grpc.StatusCode.OK) > 10


async def test_floods_of_refused_calls_are_limited(tmp_path: Path) -> None:
    tokens = tmp_path / "tokens"
    tokens.write_text(f"alice {TOKEN}\n")
    async with calls_server(api_tokens=tokens) as (_, _, server), edge(server, refused_rate="10") as address:
        async with Connector(address, token=OTHER_TOKEN).open() as channel:
            codes = [await channel.unary_unary("/calls/One")(b"a").code() for _ in range(20)]
        assert codes[:5] == [grpc.StatusCode.UNAUTHENTICATED] * 5
        assert codes[-1] is grpc.StatusCode.UNAVAILABLE
        await refuses_connections(address)


async def test_paths_that_are_not_utf8_are_refused() -> None:
    async with running() as (_, address):
        for path in (b"/calls/\xff\xfe", b"/grpc.health.v1.Health/\xff", b"/calls/One?\xff", b"\xff"):
            async with connected(address) as (reader, writer):
                writer.write(BEGUN + frame(HEADERS, END_HEADERS | END_STREAM, 1, block({b":path": path})))
                received = b""
                while not any(end in received for end in FIRST_CALL):
                    received += await reader.read(2**16)
            assert await call(address) == b"a"


async def test_calls_of_clients_that_do_not_read_end() -> None:
    async with calls_server() as (server, served, coordinator):
        served.open.set()
        async with edge(coordinator, stalled_seconds="1") as address, deaf_client(address) as deaf:
            await deaf.call("/calls/Large", b"1000000")
            await until(lambda: server._calls.count == 1)
            for _ in range(3):
                assert await call(address) == b"a"
            await until(lambda: server._calls.count == 0)


async def test_a_paused_stream_blocks_no_other_of_its_connection() -> None:
    async with running() as (_, address), deaf_client(address) as client:
        paused = [await client.call("/calls/Large", b"1000000") for _ in range(4)]
        other = await client.call("/calls/One", b"")
        client.grant(other, 100)
        await until(lambda: client.has_ended(other))
        assert not any(map(client.has_ended, paused))


async def test_calls_of_a_lost_server_are_unavailable() -> None:
    links: list[asyncio.Task[None]] = []
    async with calls_server() as (_, served, coordinator):

        def accept(*streams: Any) -> None:
            links.append(asyncio.create_task(forward(*streams, coordinator)))

        async with await asyncio.start_server(accept, "127.0.0.1", 0) as link:
            address = f"127.0.0.1:{link.sockets[0].getsockname()[1]}"
            async with edge(address) as proxy, Connector(proxy).open() as channel:
                waiting = channel.unary_unary("/calls/One")(b"a")
                await until(lambda: served.begun == 1)
                for each in links:
                    each.cancel()
                with pytest.raises(grpc.aio.AioRpcError) as failed:
                    await waiting
                assert isinstance(failure(failed.value, Connector(proxy)), UnavailableError)


async def test_calls_end_soon_after_the_drain() -> None:
    async with (
        calls_server() as (_, served, coordinator),
        edge_process(coordinator, drain_seconds="1") as (address, edge),
        Connector(address).open() as channel,
    ):
        code = asyncio.create_task(channel.unary_unary("/calls/One")(b"a").code())
        await until(lambda: served.begun == 1)
        edge.send_signal(signal.SIGUSR1)
        assert await edge.wait() == 0
        assert await code is grpc.StatusCode.UNAVAILABLE


@pytest.mark.slow
async def test_the_state_of_the_coordinator_is_logged() -> None:
    async with calls_server() as (server, _, coordinator), edge_process(coordinator) as (_, edge):
        assert edge.stdout is not None
        server.stop(drain=False)
        await server.wait_stopped()
        assert b"coordinator is DOWN" in await edge.stdout.readline()


@pytest.fixture
def pair(ca: Authority, tmp_path: Path) -> Path:
    """A certificate beside its key, as in a Kubernetes secret."""
    issued = ca.issue("edge")
    shutil.copy(issued.key, tmp_path / "tls.key")
    return Path(shutil.copy(issued.cert, tmp_path / "tls.crt"))


@pytest.mark.parametrize("mode", ["server", "mutual"])
async def test_tls_ends_at_the_edge(ca: Authority, pair: Path, mode: str) -> None:
    async with calls_server() as (_, calls, coordinator):
        calls.open.set()
        files = {"tls": mode, "cert": str(pair), "ca": str(ca.path)}
        own = ca.issue("client").options if mode == "mutual" else {}
        async with edge(coordinator, **files) as address:
            assert await call(address, tls_ca=ca.path, **own) == b"a"


@pytest.mark.parametrize(
    ("variables", "alert"),
    [
        ({"tls": "on"}, "EDGE_TLS must be off"),
        ({"tls": ""}, "EDGE_TLS must be off"),
        ({"stalled_seconds": "0"}, "EDGE_STALLED_SECONDS"),
        *(({"calls": number}, "EDGE_CALLS must be at least 1") for number in ("", "0")),
        *(({"connections": number}, "EDGE_CONNECTIONS") for number in ("0", "-1", "1.5", "many")),
        *(({"call_rate": number}, "rates must be whole numbers") for number in ("-1", "1.5")),
    ],
)
def test_mistyped_variables_are_refused(variables: dict[str, str], alert: str) -> None:
    refused = checked(**variables)
    assert refused.returncode == 1
    assert alert in refused.stderr


def test_the_defaults_are_valid() -> None:
    assert checked().returncode == 0
