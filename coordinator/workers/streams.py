"""Rounds over a long-lived stream. A new call per round would cost more than its messages."""

import asyncio
import time
from collections.abc import Callable
from typing import Any

import grpc
from grpc import StatusCode
from grpc.aio import AioRpcError, Metadata

from coordinator.workers.interface import Cause, WorkerUnreachableError
from specpool.rpc.status import ANSWERED


class RoundCalls:
    """Sends rounds over one stream, without waiting for earlier responses.

    A failed round ends the stream and all rounds on it. It is never retried on another stream, which may lead to
    another worker at the same address.
    """

    def __init__(
        self, stream: Any, timeout_seconds: float, check: Callable[[Any], None] = lambda response: None
    ) -> None:
        """`stream`: stub method. `timeout_seconds`: default timeout of a round.

        `check`: called with each response. Raises to discard it.
        """
        self._open_stream, self._timeout, self._check = stream, timeout_seconds, check
        self._current: _Stream | None = None
        """The stream for the next round."""
        self._in_use: set[_Stream] = set()
        """Streams with rounds in progress."""

    async def __call__(self, request: Any, timeout_seconds: float | None = None) -> tuple[Any, float]:
        """Return the response, and the seconds since the request, or since the previous response if that came later.

        `timeout_seconds`: limits the same time. Raises AioRpcError like a unary call, and WorkerUnreachableError if an
        earlier round on the stream has failed.
        """
        if self._current is None:
            self._current = _Stream(self._open_stream())
        stream, seconds = self._current, self._timeout if timeout_seconds is None else timeout_seconds
        self._in_use.add(stream)
        try:
            return await stream.round(request, seconds, self._check)
        finally:
            if not stream.rounds:
                self._in_use.discard(stream)
            if stream.is_broken and self._current is stream:
                self._current = None

    def open(self) -> None:
        """Open a stream for the next rounds, before the worker's description is read.

        The stream ends with its worker. The rounds therefore cannot reach a worker other than the described one.
        """
        self.close()
        self._current = _Stream(self._open_stream())

    def close(self) -> None:
        """Close the stream after the rounds in progress. The next round opens a new one."""
        stream, self._current = self._current, None
        if stream is not None:
            stream.close()

    def discard(self) -> None:
        """Close the stream now. Its rounds fail as if they had not been sent."""
        if self._current is not None:
            self._current.discard()
        self.close()

    def abort(self) -> None:
        """Close all streams now. Rounds in progress end with an error."""
        self.close()
        for stream in self._in_use:
            stream.cancel()


class _Stream:
    """A stream of rounds, whose responses come in the order of the requests."""

    def __init__(self, call: Any) -> None:
        self.call = call
        self.rounds = 0
        """Rounds in progress."""
        self._unanswered = 0
        """Rounds that were sent, and whose responses were not read yet."""
        self.is_broken = False
        self._has_failed_to_write = False
        """gRPC then hides the status of the stream behind INTERNAL."""
        self._is_closing = self._is_discarded = False
        self._writing, self._reading = asyncio.Lock(), asyncio.Lock()  # asyncio's locks are fair
        self._write_timeout: asyncio.Timeout | None = None
        """Of the write in progress."""
        self._answered = 0.0
        """When the last response arrived."""

    async def round(self, request: Any, seconds: float, check: Callable[[Any], None]) -> tuple[Any, float]:
        self.rounds += 1
        try:
            began = time.perf_counter()
            async with self._writing, self._timeout(seconds) as timeout:
                self._write_timeout = timeout
                try:
                    await self._write(request)
                finally:
                    self._write_timeout = None
            self._unanswered += 1
            async with self._reading, self._timeout(seconds):
                response = await self.call.read()
            if response is grpc.aio.EOF:
                raise _error(StatusCode.UNAVAILABLE, "the worker ended the stream")
            self._unanswered -= 1  # a round that fails before this breaks the stream
            began, self._answered = max(began, self._answered), time.perf_counter()
            check(response)
        except BaseException as error:
            was_aborted = self.is_broken
            self.cancel()
            if self._is_discarded and not is_cancelled():
                raise _not_served() from None
            if self._has_failed_to_write and isinstance(error, AioRpcError) and _is_hidden(error):
                raise _error(StatusCode.UNAVAILABLE, f"the stream broke: {error.details()}") from None
            if isinstance(error, TimeoutError) and not was_aborted:
                raise _error(StatusCode.DEADLINE_EXCEEDED, f"no response within {seconds:g} s") from None
            if isinstance(error, TimeoutError | asyncio.CancelledError) and not is_cancelled():
                raise _error(StatusCode.UNAVAILABLE, "the stream was aborted") from None
            raise
        finally:
            self.rounds -= 1
            if self._is_closing and not self.rounds:
                self.cancel()
        if response is None:  # undecodable
            self.cancel()
        return response, self._answered - began

    async def _write(self, request: Any) -> None:
        """Send a request. Raises UNAVAILABLE if the stream has ended, since its status is not about this request."""
        try:
            await self.call.write(request)
        except (asyncio.InvalidStateError, AioRpcError):
            self._has_failed_to_write = True
            if self._unanswered:
                raise _not_served() from None
            code, details = await self.call.code(), await self.call.details()
            if code is StatusCode.UNAVAILABLE:
                raise _error(code, details) from None
            reason = f"the stream had ended: {code.name}: {details}"
            raise _error(StatusCode.UNAVAILABLE, reason) from None

    def close(self) -> None:
        """End the stream after the rounds in progress."""
        self._is_closing = True
        if not self.rounds:
            self.cancel()

    def discard(self) -> None:
        """End the stream. Its rounds fail as if they had not been sent."""
        self._is_discarded = True
        self.cancel()

    def cancel(self) -> None:
        """End the stream and its rounds."""
        self.is_broken = True
        self.call.cancel()
        # gRPC does not wake a write that waits for the connection.
        if self._write_timeout is not None and not self._write_timeout.expired():
            self._write_timeout.reschedule(0)

    def _timeout(self, seconds: float) -> asyncio.Timeout:
        """A timeout that starts when it is this round's turn, unless an earlier round has failed."""
        if self.is_broken:
            raise _not_served()
        return asyncio.timeout(seconds)


def _not_served() -> WorkerUnreachableError:
    return WorkerUnreachableError("an earlier round of the stream failed", Cause.NOT_SENT)


def is_cancelled() -> bool:
    """Whether the running task is being cancelled. If not, a CancelledError means that gRPC cancelled a call."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def _is_hidden(error: AioRpcError) -> bool:
    """Whether gRPC may have replaced the status of a stream, because a write failed."""
    return error.code() is StatusCode.INTERNAL and ANSWERED not in (error.trailing_metadata() or ())


def _error(code: grpc.StatusCode, details: str) -> AioRpcError:
    return AioRpcError(code, Metadata(), Metadata(), details)
