"""Limits on calls, request memory and connections. Clients within their limits are served."""

import asyncio
import gc
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest
from call_service import MESSAGE_BYTES, Calls, calls_server
from google.rpc import error_details_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from secure_service import until
from serving import detail_of, refusal, serving

from specpool.rpc.server import limits
from specpool.rpc.server.calls import Rates
from specpool.v1 import generation_pb2 as pb

EXHAUSTED = grpc.StatusCode.RESOURCE_EXHAUSTED


@asynccontextmanager
async def running(**settings: Any) -> AsyncIterator[tuple[Calls, str]]:
    async with calls_server(**settings) as (_, calls, address):
        yield calls, address


def open_channel(address: str) -> grpc.aio.Channel:
    return grpc.aio.insecure_channel(address, options=[("grpc.use_local_subchannel_pool", 1)])


def call(channel: grpc.aio.Channel, method: str = "One", payload: bytes = b"a", client: str = "") -> Any:
    kind = channel.unary_stream if method == "Stream" else channel.unary_unary
    return kind(f"/calls/{method}")(payload, metadata=(("client", client),))


def unsent(channel: grpc.aio.Channel, client: str = "") -> Any:
    """A call whose request never arrives."""
    return channel.stream_unary("/calls/One")(metadata=(("client", client),))


async def is_healthy(channel: grpc.aio.Channel) -> bool:
    response = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(service="live"))
    return bool(response.status == health_pb2.HealthCheckResponse.SERVING)


# --- Calls


async def test_calls_beyond_max_calls_fail_before_their_request_arrives() -> None:
    async with (
        running(max_calls=2) as (calls, address),
        open_channel(address) as channel,
        open_channel(address) as other,
    ):
        first, second = asyncio.ensure_future(call(channel)), call(channel, "Stream")
        await until(lambda: calls.begun == 2)
        error = await refusal(unsent(other))
        assert error.code() is EXHAUSTED
        assert "--max-calls" in str(error.details())
        assert detail_of(error, error_details_pb2.RetryInfo).retry_delay.seconds == 1
        assert await is_healthy(other)
        listing = reflection_pb2_grpc.ServerReflectionStub(other).ServerReflectionInfo()
        await listing.write(reflection_pb2.ServerReflectionRequest(list_services=""))
        assert (await listing.read()).list_services_response.service
        calls.open.set()
        assert await first == await second.read() == b"a"
        assert await second.read() is grpc.aio.EOF
        assert await call(other) == b"a"


@pytest.mark.usefixtures("clients_by_metadata")
async def test_calls_beyond_max_calls_per_client_fail() -> None:
    async with running(max_calls_per_client=2) as (calls, address), open_channel(address) as channel:
        held = [asyncio.ensure_future(call(channel, client="greedy")) for _ in range(2)]
        await until(lambda: calls.begun == 2)
        error = await refusal(unsent(channel, client="greedy"))
        assert error.code() is EXHAUSTED
        assert "--max-calls-per-client" in str(error.details())
        other = asyncio.ensure_future(call(channel, client="modest"))
        await until(lambda: calls.begun == 3)
        calls.open.set()
        assert await asyncio.gather(*held, other) == [b"a"] * 3
        assert await call(channel, client="greedy") == b"a"


# --- Requests


async def test_late_and_missing_requests_fail() -> None:
    async with running(receive_seconds=0.2) as (_, address), open_channel(address) as channel:
        error = await refusal(unsent(channel))
        assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        assert "0.2 s (--receive-seconds)" in str(error.details())
        ended = unsent(channel)
        await ended.done_writing()
        error = await refusal(ended)
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert error.details() == "request: the call has no request"


async def test_waiting_for_a_read_slot_takes_no_time_from_the_request() -> None:
    """A busy server fails no client whose request is in time."""
    rates = Rates(concurrent_reads=1, read_slot_seconds=0.4)
    async with running(rates=rates, receive_seconds=0.5) as (calls, address), open_channel(address) as channel:
        calls.open.set()
        idle = unsent(channel)
        await asyncio.sleep(0.1)
        late = unsent(channel)
        await asyncio.sleep(0.6)
        await late.write(b"a")
        await late.done_writing()
        assert await late == b"a"
        assert await idle.code() is grpc.StatusCode.DEADLINE_EXCEEDED


@pytest.mark.usefixtures("clients_by_metadata")
async def test_idle_senders_of_many_clients_delay_nobody() -> None:
    """Even with a receive timeout much longer than the test."""
    async with running(receive_seconds=3600) as (calls, address), open_channel(address) as channel:
        calls.open.set()
        idle = [unsent(channel, client=str(i % 5)) for i in range(100)]
        for client in ("fast", "0"):
            assert await call(channel, payload=bytes(MESSAGE_BYTES // 2), client=client)
        assert await is_healthy(channel)
        waiting = {asyncio.create_task(refusal(each)) for each in idle}
        while len(waiting) > limits.MAX_SLOW_REQUESTS:  # the slowest fail
            ended, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            assert {end.result().code() for end in ended} == {grpc.StatusCode.DEADLINE_EXCEEDED}
        for each in waiting:
            each.cancel()


async def test_request_memory_is_limited() -> None:
    size = MESSAGE_BYTES // 2
    async with running(request_memory=2 * MESSAGE_BYTES) as (calls, address), open_channel(address) as channel:
        held = [asyncio.ensure_future(call(channel, payload=bytes(size))) for _ in range(3)]
        await until(lambda: calls.begun == 3)
        error = await refusal(call(channel, payload=bytes(size)))
        assert error.code() is EXHAUSTED
        assert f"{3 * size} of {4 * size} bytes (--request-memory)" in str(error.details())
        assert detail_of(error, error_details_pb2.RetryInfo).retry_delay.seconds == 1
        calls.open.set()
        await asyncio.gather(*held)
        assert await call(channel, payload=bytes(size))
    async with running(request_memory=1) as (calls, address), open_channel(address) as channel:
        calls.open.set()
        assert await call(channel, payload=bytes(100)), "a single request may exceed the limit"


@pytest.mark.parametrize("method", ["Refuse", "Fail"])
async def test_failed_calls_keep_no_reference_to_their_request(monkeypatch: pytest.MonkeyPatch, method: str) -> None:
    """Tracebacks would keep requests alive until a garbage collection."""
    monkeypatch.setattr("specpool.rpc.server.interceptor.log.disabled", True)  # pytest keeps log records
    async with running() as (calls, address), open_channel(address) as channel:
        gc.collect()
        gc.disable()
        try:
            await refusal(call(channel, method))
            await until(lambda: calls.requests[0]() is None)
        finally:
            gc.enable()


# --- Connections


async def test_idle_connections_are_closed() -> None:
    """Connections without a handshake, and connections without calls."""

    async def until_closed(greeting: bytes, rates: Rates) -> None:
        async with running(rates=rates) as (_, address):
            host, _, port = address.rpartition(":")
            reader, writer = await asyncio.open_connection(host, int(port))
            writer.write(greeting)
            while await reader.read(1000):
                pass
            writer.close()

    without_calls = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\4\0\0\0\0\0"
    await asyncio.gather(
        until_closed(b"", Rates(handshake_seconds=1)), until_closed(without_calls, Rates(idle_connection_seconds=1))
    )


# --- Health and failed calls


async def test_failed_calls_are_counted_and_logged_once_a_minute(caplog: pytest.LogCaptureFixture) -> None:
    async with serving() as served:
        for _ in range(5):
            await refusal(served.stub.Generate(pb.GenerateRequest(text="\n" * 10**6)))
        assert dict((await served.info()).counters.refused) == {"INVALID_ARGUMENT": 5}
    logged = [record.getMessage() for record in caplog.records if "ended in an error" in record.getMessage()]
    assert len(logged) == 1
    assert "INVALID_ARGUMENT" in logged[0]
