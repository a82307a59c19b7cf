"""The one interceptor of every server: identification, limits, metrics and errors of each call."""

import asyncio
import logging
import time
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing, nullcontext
from functools import partial
from itertools import product
from typing import Any, NoReturn, TypeAlias

import grpc

from specpool.protocol.errors import (
    InvalidArgumentError,
    PermissionDeniedError,
    QueueFullError,
    ServiceError,
    SlowRequestError,
    TooManyCallsError,
    UnauthenticatedError,
    UnimplementedError,
)
from specpool.rpc.config.settings import ServerSettings
from specpool.rpc.observability.line_limits import without_message
from specpool.rpc.observability.metrics import CallCounter
from specpool.rpc.server.callers import Authenticator, client_of, is_authenticated, is_health
from specpool.rpc.server.calls import ENDING_SECONDS, Call, CallLimits, Pace, Rates, status_sent
from specpool.rpc.server.health import NewestCalls
from specpool.rpc.server.limits import Calls
from specpool.rpc.server.message_memory import RequestParser
from specpool.rpc.status import ANSWERED, TrailingMetadata, status_of

log = logging.getLogger(__name__)

LOG_SECONDS = 60.0
MAX_LOGGED_CHARACTERS = 1000

Handler: TypeAlias = Any  # grpc.RpcMethodHandler, whose stubs do not cover asyncio
_REFUSALS = UnauthenticatedError, PermissionDeniedError, UnimplementedError
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

    def __init__(
        self, settings: ServerSettings, authenticator: Authenticator, counter: CallCounter | None, rates: Rates
    ) -> None:
        """`counter`: None if nobody reads the metrics."""
        self.calls = Calls(CallLimits.of(settings), rates)
        """Calls in progress, except health checks, and reflection without a credential."""
        self.refusals = Refusals()
        self._health_calls = {kind: NewestCalls(settings) for kind in product((False, True), repeat=2)}
        """By whether the client is authenticated, and whether the call is a `Check`, which ends by itself."""
        self._authenticator, self._counter = authenticator, counter
        self._pace = Pace(rates.refusals_per_second, rates.max_refusal_seconds)

    async def intercept_service(
        self, continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler]], details: grpc.HandlerCallDetails
    ) -> Handler:
        counted = self._counter.counted if self._counter is not None else lambda *_: nullcontext()
        refused: ServiceError | None = None
        try:
            self._authenticator.check_token(details)
            handler = await continuation(details)
            if handler is None:  # gRPC would answer, but not count the call
                handler, refused = _NO_HANDLER, UnimplementedError("Method not found!")
        except UnauthenticatedError as error:
            handler, refused = _NO_HANDLER, error

        async def serve(messages: AsyncIterator[bytes], context: Any) -> Any:
            with counted(details.method, context):
                call = None
                try:
                    if refused is not None:
                        raise refused
                    self._authenticator.check_certificate(details, context)
                    calls = self._calls_like(details)
                    call = calls.begin(context, drains=not details.method.startswith("/grpc."))
                    return await _answer(handler, calls, call, messages)
                except BaseException as error:
                    await status_sent(context)  # an unread stream counts until its client is gone
                    failure = _failure(error, call)
                if isinstance(failure, TooManyCallsError | QueueFullError | SlowRequestError):
                    await self._pace.turn(client_of(context))
                if isinstance(failure, InvalidArgumentError) and call is not None:
                    await self.calls.delay_refusal(call)
                return await self._abort(failure, context, has_begun=call is not None)

        if handler.response_streaming:
            return grpc.stream_stream_rpc_method_handler(serve, response_serializer=handler.response_serializer)
        return grpc.stream_unary_rpc_method_handler(serve)

    def _calls_like(self, details: grpc.HandlerCallDetails) -> Calls:
        """Return the calls that compete with a call of this method."""
        method = details.method
        if is_health(details) or (method.startswith("/grpc.") and not is_authenticated()):
            return self._health_calls[is_authenticated(), method.endswith("/Check")]
        return self.calls

    async def _abort(self, error: Exception, context: Any, has_begun: bool) -> NoReturn:
        if isinstance(error, grpc.aio.AbortError):  # the handler has answered
            raise error
        if not has_begun and isinstance(error, _REFUSALS):  # not an answer to the request: unmarked
            log.debug("refused a call from %s: %s", context.peer(), error)
            await _fail(context, *status_of(error))
        if isinstance(error, ServiceError):
            code, text, metadata = status_of(error)
            self.refusals.add(code.name, error.logged)
        else:
            incident = uuid.uuid4().hex[:8]
            log.error("internal error %s", incident, exc_info=without_message(error))
            code, metadata = grpc.StatusCode.INTERNAL, ()
            text = f"internal error {incident}; the server's log has the details"
            self.refusals.add(code.name, text)
        # The frames of `error` hold the request.
        error.__traceback__ = error.__context__ = error.__cause__ = None
        await _fail(context, code, text, (*metadata, ANSWERED))
        raise AssertionError("abort always raises")


async def _answer(handler: Handler, calls: Calls, call: Call, messages: AsyncIterator[bytes]) -> bytes | None:
    """Run a handler within the limits. Return the serialized response, or None for a stream."""
    context, parser = call.context, RequestParser[Any](handler.request_deserializer)
    if handler.request_streaming:
        request: Any = calls.read_all(call, messages, parser)
    else:
        request = await calls.read(call, messages, parser)
    if handler.response_streaming:
        answer = handler.stream_stream or handler.unary_stream
        async with aclosing(answer(request, context)) as responses:
            async for response in responses:
                await _write(context, response)
                calls.answered_next(call)
        return None
    response = await (handler.stream_unary or handler.unary_unary)(request, context)
    payload: bytes = handler.response_serializer(response) if handler.response_serializer else response
    calls.answered(call, len(payload))
    return payload


async def _fail(context: Any, code: grpc.StatusCode, text: str, metadata: TrailingMetadata) -> None:
    """Send the status of a failed call."""
    try:
        await context.abort(code, text, metadata)
    except grpc.aio.AbortError as aborted:
        task = asyncio.current_task()
        assert task is not None
        task.add_done_callback(partial(_forget_frames, aborted))
        raise
    except Exception:  # the first message is unread, or the client has disconnected
        raise asyncio.CancelledError from None


def _forget_frames(error: Exception, _: Any) -> None:
    """Break the reference cycle of an exception that gRPC keeps."""
    error.__traceback__ = None


async def _write(context: Any, response: Any) -> None:
    try:
        await context.write(response)
    except Exception:  # client disconnected; gRPC is about to cancel the call
        await asyncio.sleep(ENDING_SECONDS)
        raise


def _failure(error: BaseException, call: Call | None) -> Exception:
    """Return the error to answer with. Raise errors that end the call without an answer, such as a cancellation."""
    if isinstance(error, asyncio.CancelledError) and call is not None and call.error is not None:
        return call.error
    if not isinstance(error, Exception):
        raise error
    return error
