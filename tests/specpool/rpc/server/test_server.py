"""Health checks, drains and error messages of a server, with uncooperative clients."""

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from call_service import Calls, calls_server
from certificates import TOKEN
from deaf_client import deaf_client
from google.rpc import error_details_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from secure_service import until
from serving import detail_of

from specpool.rpc.ports import ListenError, bind_error, free_port
from specpool.rpc.server.calls import Rates
from specpool.rpc.server.server import LIVE, Server

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
SERVICE_UNKNOWN = health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
DRAIN_SECONDS = 10.0


@asynccontextmanager
async def running() -> AsyncIterator[tuple[Server, Calls, grpc.aio.Channel, int]]:
    async with (
        calls_server(Rates(last_calls_seconds=0.1), drain_seconds=DRAIN_SECONDS) as (server, calls, address),
        grpc.aio.insecure_channel(address) as channel,
    ):
        yield server, calls, channel, int(address.rpartition(":")[2])


async def stopped_after(server: Server) -> float:
    """Wait until the server has stopped. Return the elapsed seconds."""
    began = time.monotonic()
    await server.wait_stopped()
    return time.monotonic() - began


def watch(channel: grpc.aio.Channel, service: str = "") -> Any:
    return health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(service=service))


async def check(channel: grpc.aio.Channel, service: str = "") -> int:
    request = health_pb2.HealthCheckRequest(service=service)
    return (await health_pb2_grpc.HealthStub(channel).Check(request)).status


# --- Health


async def test_watches_see_every_change() -> None:
    async with running() as (server, _, channel, _):
        watches = {name: watch(channel, name) for name in ("", "calls", LIVE, "unknown")}
        first = {name: (await call.read()).status for name, call in watches.items()}
        assert first == {"": SERVING, "calls": SERVING, LIVE: SERVING, "unknown": SERVICE_UNKNOWN}
        for serving, status in ((False, NOT_SERVING), (True, SERVING)):
            server.set_serving(serving)
            for name in ("", "calls"):
                assert (await watches[name].read()).status == await check(channel, name) == status
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await check(channel, "unknown")
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND


async def test_unread_watches_block_nobody() -> None:
    async with running() as (server, _, channel, port), deaf_client(f"127.0.0.1:{port}") as deaf:
        await deaf.call("/grpc.health.v1.Health/Watch")
        for serving, status in ((False, NOT_SERVING), (True, SERVING), (False, NOT_SERVING)):
            server.set_serving(serving)
            await asyncio.sleep(0.05)
            assert await check(channel) == status
        server.stop()
        assert await stopped_after(server) < DRAIN_SECONDS / 2


async def test_drain_ends_watches() -> None:
    async with running() as (server, _, channel, _):
        call, live = watch(channel), watch(channel, LIVE)
        assert (await call.read()).status == (await live.read()).status == SERVING
        server.stop()
        seconds = asyncio.create_task(stopped_after(server))
        assert ((await call.read()).status, await call.read()) == (NOT_SERVING, grpc.aio.EOF)
        assert await live.read() is grpc.aio.EOF, "the process stays alive to the end"
        assert await seconds < DRAIN_SECONDS / 2


async def test_health_may_listen_on_another_address() -> None:
    port = free_port()
    async with calls_server(health_port=port, monitoring_host="127.0.0.2") as (_, _, address):
        for served in (address, f"127.0.0.2:{port}"):
            async with grpc.aio.insecure_channel(served) as channel:
                assert await check(channel) == SERVING
        assert bind_error("127.0.0.1", port) is None


async def test_an_unusable_monitoring_host_is_named() -> None:
    with pytest.raises(ListenError, match=r"^monitoring-host: cannot listen on 192\.0\.2\.1:"):
        async with calls_server(health_port=free_port(), monitoring_host="192.0.2.1"):
            pass


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])
async def test_tokens_in_plain_text_are_warned_of_beyond_loopback(
    host: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tokens = tmp_path / "tokens"
    tokens.write_text(f"alice {TOKEN}\n")
    async with calls_server(api_tokens=tokens, host=host):
        assert ("tokens travel in plain text" in caplog.text) == (host == "0.0.0.0")


# --- Draining


async def test_drain_does_not_wait_for_reflection() -> None:
    async with running() as (server, _, channel, _):
        call = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo()
        await call.write(reflection_pb2.ServerReflectionRequest(list_services=""))
        await call.read()
        server.stop()
        assert await stopped_after(server) < DRAIN_SECONDS / 2


@pytest.mark.parametrize("kind", ["One", "Stream"])
async def test_drain_waits_for_calls_of_services(kind: str) -> None:
    async with running() as (server, calls, channel, _):
        if kind == "One":
            answer = asyncio.ensure_future(channel.unary_unary("/calls/One")(b"a"))
        else:
            answer = asyncio.ensure_future(channel.unary_stream("/calls/Stream")(b"a").read())
        await until(lambda: calls.begun)
        watching = watch(channel)
        await watching.read()
        server.stop()
        stopping = asyncio.create_task(server.wait_stopped())
        await asyncio.sleep(0.2)
        assert not stopping.done()
        calls.open.set()
        assert await answer == b"a"
        await stopping


async def test_drain_waits_until_responses_are_received() -> None:
    """The stream of a slow reader outlives its handler."""
    async with running() as (server, calls, channel, _):
        calls.open.set()
        payload = bytes(2**19)
        call = channel.unary_stream("/calls/Stream")(payload)
        await until(lambda: calls.begun)
        server.stop()
        stopping = asyncio.create_task(server.wait_stopped())
        await asyncio.sleep(0.2)
        assert await call.read() == payload
        await stopping


async def test_second_signal_cuts_the_drain_short() -> None:
    async with running() as (server, calls, channel, _):
        signals = server.stop_on_signals()
        try:
            call = channel.unary_unary("/calls/One")(b"a")
            answer = asyncio.ensure_future(call.code())
            await until(lambda: calls.begun)
            stopping = asyncio.create_task(stopped_after(server))
            for _ in range(2):
                assert not stopping.done()
                os.kill(os.getpid(), signal.SIGTERM)
                await asyncio.sleep(0.1)
            assert await stopping < DRAIN_SECONDS / 2
            assert await answer is grpc.StatusCode.UNAVAILABLE
        finally:
            signals.close()


# --- Errors


@pytest.mark.parametrize("letter", ["x", "🙂"])
@pytest.mark.parametrize("length", [10, 100_000])
async def test_long_error_messages_are_truncated(letter: str, length: int) -> None:
    async with running() as (_, _, channel, _):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await channel.unary_unary("/calls/Refuse")((letter * length).encode())
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        details = str(caught.value.details())
        assert details.startswith(f"field: {letter * 10}")
        assert details.endswith("..." if length > 10 else letter)
        (violation,) = detail_of(caught.value, error_details_pb2.BadRequest).field_violations
        assert violation.field == "field"
        assert violation.description.startswith(letter * 10)
