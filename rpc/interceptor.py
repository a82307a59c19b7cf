"""Turns exceptions of handlers into status codes, so that no handler knows one and no stack trace reaches a client.

Calls under way are counted here too, since every handler of our services is wrapped.
"""

import asyncio
import logging
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, NoReturn, TypeAlias

import grpc
from google.protobuf.message import DecodeError

from protocol.errors import InvalidArgumentError, ServiceError
from rpc.errors import ANSWERED, status_of

log = logging.getLogger(__name__)

Handler: TypeAlias = Any  # grpc.RpcMethodHandler, whose stubs know no asyncio


class CallInterceptor(grpc.aio.ServerInterceptor):
    """Wraps handlers. Requests are parsed inside: a malformed one is an error too."""

    def __init__(self) -> None:
        self.idle = asyncio.Event()
        """Set while no call is under way, apart from those of health and reflection."""
        self.idle.set()
        self._running = 0

    async def intercept_service(
        self, continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler]], details: grpc.HandlerCallDetails
    ) -> Handler:
        handler = await continuation(details)
        # Health and reflection have errors of their own, and no drain waits for their calls.
        if handler is None or details.method.startswith("/grpc."):
            return handler
        serializer = handler.response_serializer
        if handler.request_streaming:

            def answer_all(payloads: AsyncIterator[bytes], context: Any) -> Any:
                self._count(context)
                return handler.stream_stream((_parse(handler, payload) async for payload in payloads), context)

            return grpc.stream_stream_rpc_method_handler(_streaming(answer_all), response_serializer=serializer)
        if handler.response_streaming:

            def answer(payload: bytes, context: Any) -> Any:
                self._count(context)
                return handler.unary_stream(_parse(handler, payload), context)

            return grpc.unary_stream_rpc_method_handler(_streaming(answer), response_serializer=serializer)

        async def answer_one(payload: bytes, context: Any) -> Any:
            self._count(context)
            try:
                return await handler.unary_unary(_parse(handler, payload), context)
            except Exception as error:
                await _abort(error, context)

        return grpc.unary_unary_rpc_method_handler(answer_one, response_serializer=serializer)

    def _count(self, context: Any) -> None:
        """Counts a call as under way until its client has got all of the answer."""
        self._running += 1
        self.idle.clear()
        context.add_done_callback(self._ended)

    def _ended(self, _: Any) -> None:
        self._running -= 1
        if not self._running:
            self.idle.set()


def _streaming(answer: Callable[[Any, Any], AsyncIterator[Any]]) -> Callable[[Any, Any], AsyncIterator[Any]]:
    async def behaviour(received: Any, context: Any) -> AsyncIterator[Any]:
        try:
            async for response in answer(received, context):
                yield response
        except Exception as error:
            await _abort(error, context)

    return behaviour


def _parse(handler: Handler, payload: bytes) -> Any:
    try:
        return handler.request_deserializer(payload)
    except DecodeError as error:
        raise InvalidArgumentError("request", f"not a message of the expected type ({error})") from None


async def _abort(error: Exception, context: Any) -> NoReturn:
    if isinstance(error, grpc.aio.AbortError):  # a handler that already answered
        raise error
    if isinstance(error, ServiceError):
        code, text, metadata = status_of(error)
        await context.abort(code, text, (*metadata, ANSWERED))
    incident = uuid.uuid4().hex[:8]
    log.error("internal error %s", incident, exc_info=error)
    text = f"internal error {incident}; the server's log has the details"
    await context.abort(grpc.StatusCode.INTERNAL, text, (ANSWERED,))
    raise AssertionError("abort always raises")
