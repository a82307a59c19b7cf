"""Rounds over long-lived streams. A new call per round would cost more than its messages."""

import asyncio
from collections.abc import Callable
from typing import Any

import grpc
from grpc.aio import AioRpcError, Metadata


class RoundCalls:
    """Keeps one stream per concurrent round. Falls back to unary calls if the worker has no streams.

    A failed round is never retried on another stream, which may lead to another worker at the same address.
    """

    def __init__(
        self,
        stream: Any,
        unary: Any,
        timeout_seconds: float,
        check: Callable[[Any, bool], None] = lambda response, is_bound: None,
    ) -> None:
        """`stream`, `unary`: stub methods for the same messages. `timeout_seconds`: default timeout of a round.

        `check`: called with each response, and whether it certainly came from the described worker. Raises to discard
        the response.
        """
        self._open_stream, self._unary, self._timeout, self._check = stream, unary, timeout_seconds, check
        self._idle: list[Any] = []
        self._bound: Any = None
        """The stream that was opened before the worker's description was read."""
        self._in_use: set[Any] = set()
        self._generation = 0
        """Incremented by `close`. Streams of an earlier generation serve no further round."""
        self.has_streams = True
        """Whether the worker may support streams."""

    async def __call__(self, request: Any, timeout_seconds: float | None = None) -> Any:
        """Return the response. Raises AioRpcError like a unary call."""
        seconds = self._timeout if timeout_seconds is None else timeout_seconds
        if self.has_streams:
            try:
                return await self._by_stream(request, seconds)
            except AioRpcError as error:
                if error.code() is not grpc.StatusCode.UNIMPLEMENTED:
                    raise
                self.has_streams = False
        call = self._unary(request, timeout=seconds)
        self._in_use.add(call)
        try:
            response = await call
        finally:
            self._in_use.discard(call)
        self._check(response, False)
        return response

    def open(self) -> None:
        """Open a stream for the next round, before the worker's description is read.

        The stream ends with its worker. The round therefore cannot reach a worker other than the described one.
        """
        self._bound = self._open_stream()
        self._idle.append(self._bound)

    def close(self) -> None:
        """Close idle streams now and busy streams after their round. The next round opens a new stream."""
        self._generation += 1
        self._bound = None
        self.has_streams = True  # the next worker may support streams
        while self._idle:
            self._idle.pop().cancel()

    def abort(self) -> None:
        """Close all streams now. Rounds in progress end with an error."""
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
            if response is not grpc.aio.EOF:
                self._check(response, stream is self._bound)
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
