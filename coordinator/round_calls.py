"""Rounds over a stream that stays open: a new call for each would cost more than their messages."""

import asyncio
from typing import Any

import grpc
from grpc.aio import AioRpcError, Metadata


class RoundCalls:
    """As many streams as rounds are under way at a time; single calls to a worker that knows no streams."""

    def __init__(self, stream: Any, single: Any, timeout_seconds: float) -> None:
        """Two methods of a stub, for the same messages. `timeout_seconds`: for each round."""
        self._open_stream, self._single, self._timeout = stream, single, timeout_seconds
        self._idle: list[Any] = []
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
        """Ends the streams that wait for a round; the next one opens another."""
        while self._idle:
            self._idle.pop().cancel()

    async def _by_stream(self, request: Any) -> Any:
        stream = self._idle.pop() if self._idle else self._open_stream()
        if stream.done():  # while it waited: that says nothing about the worker now
            stream = self._open_stream()
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
        self._idle.append(stream)
        return response


def _failure(code: grpc.StatusCode, details: str) -> AioRpcError:
    return AioRpcError(code, Metadata(), Metadata(), details)
