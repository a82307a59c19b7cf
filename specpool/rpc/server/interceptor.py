"""Turns exceptions of handlers into status codes, so that no handler knows one and no stack trace reaches a client.

Every handler is wrapped, so the bounds of calls in progress are kept here too.
"""

import asyncio
import logging
import time
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from typing import Any, NoReturn, TypeAlias

import grpc
from google.protobuf.message import DecodeError

from specpool.protocol.errors import InvalidArgumentError, ServiceError, UnavailableError
from specpool.rpc.config.settings import ServerSettings
from specpool.rpc.errors import ANSWERED, status_of
from specpool.rpc.observability.logs import without_message
from specpool.rpc.server.limits import ENDING_SECONDS, Call, CallLimits, Calls
from specpool.rpc.server.unread import status_sent

log = logging.getLogger(__name__)

LOG_SECONDS = 60.0
MOST_LOGGED_CHARACTERS = 1000

Handler: TypeAlias = Any  # grpc.RpcMethodHandler, whose stubs know no asyncio


class Refusals:
    """Calls that ended in an error: counted, and logged once in a while, so that no flood of them fills a log."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        """By the name of the status code."""
        self._logged_at = -LOG_SECONDS
        self._unlogged = 0

    def add(self, code: str, text: str) -> None:
        """Counts a call."""
        self.counts[code] += 1
        self._unlogged += 1
        if time.monotonic() >= self._logged_at + LOG_SECONDS:
            shown = text[:MOST_LOGGED_CHARACTERS]
            log.warning("%d calls ended in an error; the last one in %s: %r", self._unlogged, code, shown)
            self._logged_at, self._unlogged = time.monotonic(), 0


class CallInterceptor(grpc.aio.ServerInterceptor):
    """Wraps all handlers as handlers of streams of requests, so that each request is read here, when the limits allow
    it. Requests are parsed here too: a malformed one is an error like any other."""

    def __init__(self, settings: ServerSettings) -> None:
        self.calls = Calls(CallLimits.of_services(settings))
        """The calls in progress, apart from those of health and reflection, for which no drain waits."""
        self._health_calls = Calls(CallLimits.of_health(settings))
        self.refusals = Refusals()

    async def intercept_service(
        self, continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler]], details: grpc.HandlerCallDetails
    ) -> Handler:
        handler = await continuation(details)
        if handler is None:
            return None
        calls = self._health_calls if details.method.startswith("/grpc.") else self.calls
        if handler.response_streaming:
            answer_all = handler.stream_stream or handler.unary_stream

            async def stream(messages: AsyncIterator[bytes], context: Any) -> None:
                try:
                    call = calls.begin(context)
                    answers = answer_all(await _received(handler, calls, call, messages), context)
                    async with aclosing(answers) as responses:
                        async for response in responses:
                            await _write(context, response)
                    return
                except BaseException as error:
                    await status_sent(context)  # of a stream that is not read: it counts until its client is gone
                    failure = _failure(error, calls)
                await _abort(failure, context, self.refusals)

            return grpc.stream_stream_rpc_method_handler(stream, response_serializer=handler.response_serializer)
        answer_one = handler.stream_unary or handler.unary_unary

        async def respond(messages: AsyncIterator[bytes], context: Any) -> Any:
            try:
                call = calls.begin(context)
                response = await answer_one(await _received(handler, calls, call, messages), context)
                calls.answer(call, response)
                return response
            except BaseException as error:
                failure = _failure(error, calls)
            return await _abort(failure, context, self.refusals)

        return grpc.stream_unary_rpc_method_handler(respond, response_serializer=handler.response_serializer)


async def _received(handler: Handler, calls: Calls, call: Call, messages: AsyncIterator[bytes]) -> Any:
    """The request of a call, or the stream of its requests."""
    if handler.request_streaming:
        return (_parse(handler, payload) async for payload in messages)
    return await calls.read(call, messages, lambda payload: _parse(handler, payload))


async def _write(context: Any, response: Any) -> None:
    try:
        await context.write(response)
    except Exception:  # the client has left, which is no fault: gRPC cancels the call in a moment
        await asyncio.sleep(ENDING_SECONDS)
        raise


def _failure(error: BaseException, calls: Calls) -> Exception:
    """The error that a call ends in; raises one that ends the call without an answer."""
    if isinstance(error, asyncio.CancelledError) and calls.cut_off:
        return UnavailableError("the server is shutting down")
    if not isinstance(error, Exception):
        raise error
    return error


def _parse(handler: Handler, payload: bytes) -> Any:
    try:
        return handler.request_deserializer(payload)
    except DecodeError as error:
        raise InvalidArgumentError("request", f"not a message of the expected type ({error})") from None


async def _abort(error: Exception, context: Any, refusals: Refusals) -> NoReturn:
    if isinstance(error, grpc.aio.AbortError):  # a handler that already answered
        raise error
    if isinstance(error, ServiceError):
        code, text, metadata = status_of(error)
        refusals.add(code.name, error.logged)
    else:
        incident = uuid.uuid4().hex[:8]
        log.error("internal error %s", incident, exc_info=without_message(error))
        code, metadata = grpc.StatusCode.INTERNAL, ()
        text = f"internal error {incident}; the server's log has the details"
        refusals.add(code.name, text)
    # gRPC keeps the exception raised here until some garbage collection, and the frames of `error` hold the whole
    # request.
    error.__traceback__ = error.__context__ = error.__cause__ = None
    await context.abort(code, text, (*metadata, ANSWERED))
    raise AssertionError("abort always raises")
