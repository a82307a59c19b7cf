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
        """Two methods of a stub, for the same messages. `timeout_seconds`: for each round."""
        self._open_stream, self._single, self._timeout = stream, single, timeout_seconds
        self._idle: list[Any] = []
        self._closed = 0
        """Number of calls of `close`: a stream that was in use then must not serve another round."""
        self._has_streams = True

    async def __call__(self, request: Any) -> Any:
        """The response. AioRpcError as a single call would raise it."""
        if self._has_streams:
            try:
                return await self._by_stream(request)
            except AioRpcError as error:
                if error.code() is not grpc.StatusCode.UNIMPLEMENTED:
                    raise
                self._has_streams = False
        return await self._single(request, timeout=self._timeout)

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

    async def _by_stream(self, request: Any) -> Any:
        stream = self._idle.pop() if self._idle else self._open_stream()
        closed = self._closed
        try:
            async with asyncio.timeout(self._timeout):
                await _write(stream, request)
                response = await stream.read()
        except BaseException as error:
            stream.cancel()
            if isinstance(error, TimeoutError):
                raise _failure(grpc.StatusCode.DEADLINE_EXCEEDED, f"no answer in {self._timeout:g} s") from None
            raise
        if response is grpc.aio.EOF:
            raise _failure(grpc.StatusCode.UNAVAILABLE, "the worker ended the stream")
        if closed == self._closed:
            self._idle.append(stream)
        else:
            stream.cancel()
        return response


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
