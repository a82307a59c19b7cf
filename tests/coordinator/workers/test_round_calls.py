"""Rounds over long-lived streams, with a misbehaving server."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import grpc
import pytest
from grpc import StatusCode
from grpc.aio import Metadata
from grpc_health.v1 import health_pb2
from secure_service import until
from serving import PATIENCE_SECONDS, RecordingTarget, make_request, serving

from coordinator.workers.interface import Cause, WorkerUnreachableError
from coordinator.workers.streams import RoundCalls
from specpool.rpc.security.channel import Connector


class Echo(grpc.GenericRpcHandler):
    """Responds to `x` with `x!`, except to commands."""

    def __init__(self) -> None:
        self.streams = self.ended = 0

    def service(self, details: grpc.HandlerCallDetails) -> Any:
        return grpc.stream_stream_rpc_method_handler(self.stream)

    async def stream(self, requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
        self.streams += 1
        try:
            async for request in requests:
                if request == b"end":
                    return
                if request == b"fail":
                    await context.abort(StatusCode.INTERNAL, "told to fail")
                if request == b"slow":
                    await asyncio.sleep(0.2)
                if request == b"hang":
                    await asyncio.sleep(PATIENCE_SECONDS)
                yield request + b"!"
                if request == b"last":
                    return
                if request == b"last and fail":
                    await context.abort(StatusCode.INTERNAL, "told to fail")
        finally:
            self.ended += 1


@asynccontextmanager
async def echoing(timeout_seconds: float = PATIENCE_SECONDS) -> AsyncIterator[tuple[Echo, RoundCalls]]:
    echo, server = Echo(), grpc.aio.server()
    server.add_generic_rpc_handlers((echo,))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with Connector(f"127.0.0.1:{port}").open() as channel:
        yield echo, RoundCalls(channel.stream_stream("/echo/Stream"), timeout_seconds)
    await server.stop(None)


@pytest.mark.parametrize("open_first", [False, True])
async def test_consecutive_rounds_share_a_stream(open_first: bool) -> None:
    async with echoing() as (echo, calls):
        if open_first:
            calls.open()
            await until(lambda: echo.streams == 1)
        assert [(await calls(request))[0] for request in (b"a", b"b", b"c")] == [b"a!", b"b!", b"c!"]
        assert echo.streams == 1


async def test_concurrent_rounds_share_the_stream_in_order() -> None:
    async with echoing() as (echo, calls):
        for _ in range(3):
            (slow, seconds), (fast, own_seconds) = await asyncio.gather(calls(b"slow"), calls(b"b"))
            assert (slow, fast) == (b"slow!", b"b!")
            assert own_seconds < seconds, "the time after the slow round"
        assert echo.streams == 1


@pytest.mark.parametrize("command", [b"fail", b"end", b"hang"])
async def test_a_failed_round_ends_later_rounds_without_blaming_them(command: bytes) -> None:
    async with echoing(timeout_seconds=0.5) as (echo, calls):
        first, second = await asyncio.gather(calls(command), calls(b"b"), return_exceptions=True)
        assert isinstance(first, grpc.aio.AioRpcError)
        assert isinstance(second, WorkerUnreachableError)
        assert second.cause is Cause.NOT_SENT
        assert (await calls(b"c"))[0] == b"c!"
        assert echo.streams == 2


@pytest.mark.parametrize(
    ("command", "code"),
    [
        (b"end", StatusCode.UNAVAILABLE),
        (b"fail", StatusCode.INTERNAL),
        (b"hang", StatusCode.DEADLINE_EXCEEDED),
    ],
)
async def test_failed_rounds_close_their_stream(command: bytes, code: StatusCode) -> None:
    async with echoing(timeout_seconds=0.5) as (echo, calls):
        await calls(b"a")
        with pytest.raises(grpc.aio.AioRpcError) as failed:
            await calls(command)
        assert failed.value.code() is code
        assert (await calls(b"b"))[0] == b"b!"
        await until(lambda: echo.ended == echo.streams - 1)  # including the hanging one
        assert echo.streams == 2


@pytest.mark.parametrize("command", [b"last", b"last and fail"])
async def test_idle_stream_that_ended_is_unavailable(command: bytes) -> None:
    """Its status is not an answer to the round. Another worker may be at the address now."""
    async with echoing() as (echo, calls):
        await calls(command)
        await until(calls._current.call.done)
        with pytest.raises(grpc.aio.AioRpcError, match="had ended") as failed:
            await calls(b"a")
        assert failed.value.code() is StatusCode.UNAVAILABLE
        assert echo.streams == 1
        assert (await calls(b"a"))[0] == b"a!"


def break_writes(stream: Any) -> None:
    """Let writes fail as gRPC does, which then ends the stream."""

    async def write(_: bytes) -> None:
        stream.cancel()
        raise grpc.aio.AioRpcError(StatusCode.INTERNAL, Metadata(), Metadata(), "told to fail")

    async def code() -> StatusCode:
        return StatusCode.INTERNAL

    stream.write, stream.code = write, code


async def test_failed_writes_are_unavailable() -> None:
    async with echoing() as (echo, calls):
        await calls(b"a")
        break_writes(calls._current.call)
        with pytest.raises(grpc.aio.AioRpcError) as failed:
            await calls(b"b")
        assert failed.value.code() is StatusCode.UNAVAILABLE
        assert echo.streams == 1


class Broken:
    """A stream that breaks after some requests. gRPC usually ends it with INTERNAL then, whatever its status was."""

    def __init__(self, sent: int = 1, code: StatusCode = StatusCode.INTERNAL) -> None:
        self.left, self.broken = sent, asyncio.Event()
        self.error = grpc.aio.AioRpcError(code, Metadata(), Metadata(), "Internal error from Core")

    async def write(self, request: bytes) -> None:
        await asyncio.sleep(0)  # other rounds start meanwhile
        self.left -= 1
        if self.left < 0:
            self.broken.set()
            raise self.error

    async def read(self) -> bytes:
        await self.broken.wait()
        raise self.error

    async def code(self) -> StatusCode:
        return self.error.code()

    async def details(self) -> str | None:
        return self.error.details()

    def cancel(self) -> None:
        pass


async def test_a_failed_write_does_not_blame_the_round_before() -> None:
    calls = RoundCalls(Broken, PATIENCE_SECONDS)
    first, second = await asyncio.gather(calls(b"a"), calls(b"b"), return_exceptions=True)
    assert isinstance(first, grpc.aio.AioRpcError)
    assert first.code() is StatusCode.UNAVAILABLE
    assert isinstance(second, WorkerUnreachableError)


class Ending(Broken):
    """A stream that ends while the second request is being written."""

    def __init__(self) -> None:
        super().__init__()
        self.is_writing = asyncio.Event()

    async def write(self, request: bytes) -> None:
        if self.left:
            return await super().write(request)
        self.is_writing.set()
        await self.broken.wait()
        raise self.error

    async def read(self) -> Any:
        await self.is_writing.wait()
        self.broken.set()
        return grpc.aio.EOF


async def test_a_stream_that_ends_does_not_blame_the_round_after() -> None:
    calls = RoundCalls(Ending, PATIENCE_SECONDS)
    first, second = await asyncio.gather(calls(b"a"), calls(b"b"), return_exceptions=True)
    assert isinstance(first, grpc.aio.AioRpcError)
    assert isinstance(second, WorkerUnreachableError)
    assert second.cause is Cause.NOT_SENT


async def test_the_first_of_several_rounds_on_a_dead_stream_counts_as_lost() -> None:
    """Otherwise none of them would, and the coordinator would send the same rounds for ever."""
    calls = RoundCalls(partial(Broken, 0, StatusCode.UNAVAILABLE), PATIENCE_SECONDS)
    first, second = await asyncio.gather(calls(b"a"), calls(b"b"), return_exceptions=True)
    assert isinstance(first, grpc.aio.AioRpcError)
    assert first.code() is StatusCode.UNAVAILABLE
    assert isinstance(second, WorkerUnreachableError)


async def test_cancelled_round_ends_its_stream() -> None:
    async with echoing() as (echo, calls):
        task = asyncio.create_task(calls(b"hang"))
        await until(lambda: echo.streams == 1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await until(lambda: echo.ended == 1)
        assert (await calls(b"a"))[0] == b"a!"


async def test_close_ends_idle_streams_now_and_busy_ones_after_their_round() -> None:
    async with echoing() as (echo, calls):
        await calls(b"a")
        calls.close()
        await until(lambda: echo.ended == 1)
        task = asyncio.create_task(calls(b"slow"))
        await until(lambda: echo.streams == 2)
        calls.close()
        assert (await task)[0] == b"slow!"
        await until(lambda: echo.ended == 2)
        assert calls._current is None


async def test_draining_worker_does_not_wait_for_idle_streams() -> None:
    target = RecordingTarget()
    async with serving(target) as served:
        await served.expect(make_request([1, 2, 3], 5))
        assert served.process.coordinator.target._rounds._current is not None
        await target._health.set("", health_pb2.HealthCheckResponse.NOT_SERVING)
        await served.until(lambda info: info.target.state != "ready")
        assert served.process.coordinator.target._rounds._current is None


async def test_aborted_rounds_do_not_wait_for_a_connection() -> None:
    """gRPC does not wake a first write when its call is cancelled, so the round waited for its timeout."""
    connections: list[asyncio.StreamWriter] = []
    black_hole = await asyncio.start_server(lambda _, writer: connections.append(writer), "127.0.0.1", 0)
    port = black_hole.sockets[0].getsockname()[1]
    async with Connector(f"127.0.0.1:{port}").open() as channel:
        calls = RoundCalls(channel.stream_stream("/echo/Stream"), 10 * PATIENCE_SECONDS)
        rounds = [asyncio.create_task(calls(request)) for request in (b"a", b"b")]
        await until(lambda: connections)
        for _ in range(2):  # the second one finds a write that has not ended yet
            calls.abort()
            await asyncio.sleep(0)
        async with asyncio.timeout(PATIENCE_SECONDS):
            first, second = await asyncio.gather(*rounds, return_exceptions=True)
    assert isinstance(first, grpc.aio.AioRpcError)
    assert first.code() is StatusCode.UNAVAILABLE
    assert isinstance(second, WorkerUnreachableError)
    assert second.cause is Cause.NOT_SENT
    for writer in connections:
        writer.close()
    black_hole.close()
