"""Rounds over long-lived streams. A new call per round would cost more than its messages."""

import asyncio
from typing import Any

import grpc
from grpc.aio import AioRpcError, Metadata


class RoundCalls:
    """Keeps one stream per concurrent round. Falls back to unary calls if the worker has no streams.

    A failed round is never retried on another stream, which may lead to another worker at the same address.
    """

    def __init__(self, stream: Any, unary: Any, timeout_seconds: float) -> None:
        """`stream`, `unary`: stub methods for the same messages. `timeout_seconds`: default timeout of a round."""
        self._open_stream, self._unary, self._timeout = stream, unary, timeout_seconds
        self._idle: list[Any] = []
        self._in_use: set[Any] = set()
        self._generation = 0
        """Incremented by `close`. Streams of an earlier generation serve no further round."""
        self._has_streams = True

    async def __call__(self, request: Any, timeout_seconds: float | None = None) -> Any:
        """Return the response. Raises AioRpcError like a unary call."""
        seconds = self._timeout if timeout_seconds is None else timeout_seconds
        if self._has_streams:
            try:
                return await self._by_stream(request, seconds)
            except AioRpcError as error:
                if error.code() is not grpc.StatusCode.UNIMPLEMENTED:
                    raise
                self._has_streams = False
        return await self._unary(request, timeout=seconds)

    def open(self) -> None:
        """Open a stream for the next round, before the worker's description is read.

        The stream ends with its worker. The round therefore cannot reach a worker other than the described one.
        """
        self._idle.append(self._open_stream())

    def close(self) -> None:
        """Close idle streams now and busy streams after their round. The next round opens a new stream."""
        self._generation += 1
        self._has_streams = True  # the next worker may support streams
        while self._idle:
            self._idle.pop().cancel()

    def abort(self) -> None:
        """Close all streams now. Rounds in progress fail as UNAVAILABLE."""
        self.close()
        for stream in self._in_use:
            stream.cancel()

    async def _by_stream(self, request: Any, seconds: float) -> Any:
        stream = self._idle.pop() if self._idle else self._open_stream()
        self._in_use.add(stream)
        generation = self._generation
        try:
            async with asyncio.timeout(seconds):
                await _write(stream, request)
                response = await stream.read()
        except BaseException as error:
            stream.cancel()
            if isinstance(error, TimeoutError):
                raise _error(grpc.StatusCode.DEADLINE_EXCEEDED, f"no response within {seconds:g} s") from None
            if isinstance(error, asyncio.CancelledError) and not is_cancelled():
                raise _error(grpc.StatusCode.UNAVAILABLE, "the stream was aborted") from None
            raise
        finally:
            self._in_use.discard(stream)
        if response is grpc.aio.EOF:
            raise _error(grpc.StatusCode.UNAVAILABLE, "the worker ended the stream")
        if generation == self._generation and response is not None:
            self._idle.append(stream)
        else:
            stream.cancel()
        return response


def is_cancelled() -> bool:
    """Whether the running task is being cancelled. If not, a CancelledError means that gRPC cancelled a call."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


async def _write(stream: Any, request: Any) -> None:
    """Send a request. Raises UNAVAILABLE if the stream has ended, since its status is not an answer to the request."""
    try:
        await stream.write(request)
    except (asyncio.InvalidStateError, AioRpcError):
        code, details = await stream.code(), await stream.details()
        if code not in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.UNIMPLEMENTED):
            code, details = grpc.StatusCode.UNAVAILABLE, f"the stream had ended: {code.name}: {details}"
        raise _error(code, details) from None


def _error(code: grpc.StatusCode, details: str) -> AioRpcError:
    return AioRpcError(code, Metadata(), Metadata(), details)
