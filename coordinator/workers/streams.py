"""Rounds over a stream that stays open: a new call for each would cost more than their messages."""

import asyncio
from typing import Any

import grpc
from grpc.aio import AioRpcError, Metadata


class RoundCalls:
    """A stream for each round under way at a time; single calls to a worker that knows no streams.

    A round is never tried again on another stream, which may be that of another worker at the same address.
    """

    def __init__(self, stream: Any, single: Any, timeout_seconds: float) -> None:
        """Two methods of a stub, for the same messages. `timeout_seconds`: for a round that has no limit of its own."""
        self._open_stream, self._single, self._timeout = stream, single, timeout_seconds
        self._idle: list[Any] = []
        self._in_use: set[Any] = set()
        self._closed = 0
        """Number of calls of `close`: a stream that was in use then must not serve another round."""
        self._has_streams = True

    async def __call__(self, request: Any, timeout_seconds: float | None = None) -> Any:
        """The response. AioRpcError as a single call would raise it."""
        seconds = self._timeout if timeout_seconds is None else timeout_seconds
        if self._has_streams:
            try:
                return await self._by_stream(request, seconds)
            except AioRpcError as error:
                if error.code() is not grpc.StatusCode.UNIMPLEMENTED:
                    raise
                self._has_streams = False
        return await self._single(request, timeout=seconds)

    def open(self) -> None:
        """Opens a stream for the next round. It ends with its worker, so that the round reaches either the worker that
        describes itself after this call, or none."""
        self._idle.append(self._open_stream())

    def close(self) -> None:
        """Ends idle streams now, and streams in use after their round; the next round opens another."""
        self._closed += 1
        self._has_streams = True  # the worker may be another one when it is back
        while self._idle:
            self._idle.pop().cancel()

    def cut(self) -> None:
        """Ends all streams now. Rounds under way fail as UNAVAILABLE."""
        self.close()
        for stream in self._in_use:
            stream.cancel()

    async def _by_stream(self, request: Any, seconds: float) -> Any:
        stream = self._idle.pop() if self._idle else self._open_stream()
        self._in_use.add(stream)
        closed = self._closed
        try:
            async with asyncio.timeout(seconds):
                await _write(stream, request)
                response = await stream.read()
        except BaseException as error:
            stream.cancel()
            if isinstance(error, TimeoutError):
                raise _failure(grpc.StatusCode.DEADLINE_EXCEEDED, f"no answer in {seconds:g} s") from None
            if isinstance(error, asyncio.CancelledError) and not was_cancelled():
                raise _failure(grpc.StatusCode.UNAVAILABLE, "the stream was cut") from None
            raise
        finally:
            self._in_use.discard(stream)
        if response is grpc.aio.EOF:
            raise _failure(grpc.StatusCode.UNAVAILABLE, "the worker ended the stream")
        if closed == self._closed and response is not None:
            self._idle.append(stream)
        else:
            stream.cancel()
        return response


def was_cancelled() -> bool:
    """Whether the running task is to end: otherwise a CancelledError only means that a call was ended below it."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


async def _write(stream: Any, request: Any) -> None:
    """Sends a request. AioRpcError UNAVAILABLE if the stream has ended: the status it ended with is no answer to it."""
    try:
        await stream.write(request)
    except (asyncio.InvalidStateError, AioRpcError):
        code, details = await stream.code(), await stream.details()
        if code not in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.UNIMPLEMENTED):
            code, details = grpc.StatusCode.UNAVAILABLE, f"the stream had ended: {code.name}: {details}"
        raise _failure(code, details) from None


def _failure(code: grpc.StatusCode, details: str) -> AioRpcError:
    return AioRpcError(code, Metadata(), Metadata(), details)
