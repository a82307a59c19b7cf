"""Rounds over a stream that stays open: a new call for each would cost more than their messages."""

import asyncio
from typing import Any

import grpc
from grpc.aio import AioRpcError, Metadata

# Status codes of a stream that may have broken while it was idle: the worker may answer on a new one.
_MAY_BE_OLD = {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.INTERNAL}


class RoundCalls:
    """A stream for each round under way at a time; single calls to a worker that knows no streams."""

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

    def close(self) -> None:
        """Ends idle streams now, and streams in use after their round; the next round opens another."""
        self._closed += 1
        self._has_streams = True  # the worker may be another one when it is back
        while self._idle:
            self._idle.pop().cancel()

    async def _by_stream(self, request: Any) -> Any:
        if self._idle:
            try:
                return await self._exchange(self._idle.pop(), request)
            except asyncio.InvalidStateError:  # it ended while it waited
                pass
            except AioRpcError as error:
                if error.code() not in _MAY_BE_OLD:
                    raise
        return await self._exchange(self._open_stream(), request)

    async def _exchange(self, stream: Any, request: Any) -> Any:
        closed = self._closed
        try:
            async with asyncio.timeout(self._timeout):
                await stream.write(request)
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


def _failure(code: grpc.StatusCode, details: str) -> AioRpcError:
    return AioRpcError(code, Metadata(), Metadata(), details)
