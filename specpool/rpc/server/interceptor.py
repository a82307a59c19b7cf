"""The one interceptor of every server: identification, limits, metrics and errors of each call."""

import asyncio
import logging
import time
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing, nullcontext
from typing import Any, NoReturn, TypeAlias

import grpc
from google.protobuf.message import DecodeError

from specpool.protocol.errors import (
    InvalidArgumentError,
    PermissionDeniedError,
    ServiceError,
    UnauthenticatedError,
    UnavailableError,
)
from specpool.rpc.config.settings import ServerSettings
from specpool.rpc.observability.logs import without_message
from specpool.rpc.observability.metrics import CallCounter
from specpool.rpc.server.callers import Authenticator
from specpool.rpc.server.limits import ENDING_SECONDS, Call, CallLimits, Calls
from specpool.rpc.server.unread import status_sent
from specpool.rpc.status import ANSWERED, status_of

log = logging.getLogger(__name__)

LOG_SECONDS = 60.0
MAX_LOGGED_CHARACTERS = 1000

Handler: TypeAlias = Any  # grpc.RpcMethodHandler, whose stubs do not cover asyncio
_NO_HANDLER: Handler = grpc.unary_unary_rpc_method_handler(lambda *_: None)


class Refusals:
    """Counts calls that ended in an error. Logs at most one line per minute, so that floods cannot fill the log."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        """By name of the status code."""
        self._logged_at = -LOG_SECONDS
        self._unlogged = 0

    def add(self, code: str, text: str) -> None:
        self.counts[code] += 1
        self._unlogged += 1
        if time.monotonic() >= self._logged_at + LOG_SECONDS:
            shown = text[:MAX_LOGGED_CHARACTERS]
            log.warning("%d calls ended in an error; the last one in %s: %r", self._unlogged, code, shown)
            self._logged_at, self._unlogged = time.monotonic(), 0


class CallInterceptor(grpc.aio.ServerInterceptor):
    """Wraps each handler once.

    The wrapper reads and parses requests itself, to enforce the limits first and to report malformed requests like any
    other error. It therefore registers every method as one with a request stream.
    """

    def __init__(self, settings: ServerSettings, authenticator: Authenticator, counter: CallCounter | None) -> None:
        """`counter`: None if nobody reads the metrics."""
        self.calls = Calls(CallLimits.of_services(settings))
        """Calls in progress, except health and reflection, which a drain does not wait for."""
        self.refusals = Refusals()
        self._health_calls = Calls(CallLimits.of_health(settings))
        self._authenticator, self._counter = authenticator, counter

    async def intercept_service(
        self, continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler]], details: grpc.HandlerCallDetails
    ) -> Handler:
        counted = self._counter.counted if self._counter is not None else lambda *_: nullcontext()
        calls = self._health_calls if details.method.startswith("/grpc.") else self.calls
        refused = None
        try:
            self._authenticator.check_token(details)
            handler = await continuation(details)
        except UnauthenticatedError as error:
            handler, refused = _NO_HANDLER, error
        if handler is None:  # gRPC itself answers UNIMPLEMENTED
            return None

        async def serve(messages: AsyncIterator[bytes], context: Any) -> Any:
            with counted(details.method, context):
                try:
                    if refused is not None:
                        raise refused
                    self._authenticator.check_certificate(details, context)
                    return await _answer(handler, calls, messages, context)
                except BaseException as error:
                    await status_sent(context)  # an unread stream counts until its client is gone
                    failure = _failure(error, calls)
                return await self._abort(failure, context)

        kind = "stream_stream" if handler.response_streaming else "stream_unary"
        return getattr(grpc, f"{kind}_rpc_method_handler")(serve, response_serializer=handler.response_serializer)

    async def _abort(self, error: Exception, context: Any) -> NoReturn:
        if isinstance(error, grpc.aio.AbortError):  # the handler has answered
            raise error
        if isinstance(error, UnauthenticatedError | PermissionDeniedError):  # not an answer to the request: unmarked
            log.debug("refused a call from %s: %s", context.peer(), error)
            await context.abort(*status_of(error))
        if isinstance(error, ServiceError):
            code, text, metadata = status_of(error)
            self.refusals.add(code.name, error.logged)
        else:
            incident = uuid.uuid4().hex[:8]
            log.error("internal error %s", incident, exc_info=without_message(error))
            code, metadata = grpc.StatusCode.INTERNAL, ()
            text = f"internal error {incident}; the server's log has the details"
            self.refusals.add(code.name, text)
        # gRPC keeps the exception raised here until a garbage collection, and the frames of `error` hold the request.
        error.__traceback__ = error.__context__ = error.__cause__ = None
        await context.abort(code, text, (*metadata, ANSWERED))
        raise AssertionError("abort always raises")


async def _answer(handler: Handler, calls: Calls, messages: AsyncIterator[bytes], context: Any) -> Any:
    """Run a handler within the limits. Return the response, or None for a stream."""
    call = calls.begin(context)
    request = await _request(handler, calls, call, messages)
    if handler.response_streaming:
        answer = handler.stream_stream or handler.unary_stream
        async with aclosing(answer(request, context)) as responses:
            async for response in responses:
                await _write(context, response)
        return None
    response = await (handler.stream_unary or handler.unary_unary)(request, context)
    calls.hold_response(call, response)
    return response


async def _request(handler: Handler, calls: Calls, call: Call, messages: AsyncIterator[bytes]) -> Any:
    """Return the request of a call, or the stream of its requests."""
    if handler.request_streaming:
        return (_parse(handler, payload) async for payload in messages)
    return await calls.read(call, messages, lambda payload: _parse(handler, payload))


def _parse(handler: Handler, payload: bytes) -> Any:
    try:
        return handler.request_deserializer(payload)
    except DecodeError as error:
        raise InvalidArgumentError("request", f"not a message of the expected type ({error})") from None


async def _write(context: Any, response: Any) -> None:
    try:
        await context.write(response)
    except Exception:  # client disconnected; gRPC is about to cancel the call
        await asyncio.sleep(ENDING_SECONDS)
        raise


def _failure(error: BaseException, calls: Calls) -> Exception:
    """Return the error to answer with. Raise errors that end the call without an answer, such as a cancellation."""
    if isinstance(error, asyncio.CancelledError) and calls.cut_off:
        return UnavailableError("the server is shutting down")
    if not isinstance(error, Exception):
        raise error
    return error
