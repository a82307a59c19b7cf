"""Turns exceptions of handlers into status codes, so that no handler knows one and no stack trace reaches a client."""

import logging
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, NoReturn, TypeAlias

import grpc
from google.protobuf.message import DecodeError

from rpc.errors import STATUS_CODES, InvalidArgumentError, ServiceError, status_metadata

log = logging.getLogger(__name__)

Handler: TypeAlias = Any  # grpc.RpcMethodHandler, whose stubs know no asyncio


class ErrorInterceptor(grpc.aio.ServerInterceptor):
    """Wraps handlers. Requests are parsed inside: a malformed one is an error too."""

    async def intercept_service(
        self, continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler]], details: grpc.HandlerCallDetails
    ) -> Handler:
        handler = await continuation(details)
        # Reflection and health are libraries with errors of their own.
        if handler is None or details.method.startswith("/grpc."):
            return handler
        if handler.request_streaming:
            return grpc.stream_stream_rpc_method_handler(
                _both_streaming(handler), response_serializer=handler.response_serializer
            )
        if handler.response_streaming:
            return grpc.unary_stream_rpc_method_handler(
                _streaming(handler), response_serializer=handler.response_serializer
            )
        return grpc.unary_unary_rpc_method_handler(_unary(handler), response_serializer=handler.response_serializer)


def _unary(handler: Handler) -> Callable[[bytes, Any], Awaitable[Any]]:
    async def behaviour(payload: bytes, context: Any) -> Any:
        try:
            return await handler.unary_unary(_parse(handler, payload), context)
        except Exception as error:
            await _abort(error, context)

    return behaviour


def _streaming(handler: Handler) -> Callable[[bytes, Any], AsyncIterator[Any]]:
    async def behaviour(payload: bytes, context: Any) -> AsyncIterator[Any]:
        try:
            async for response in handler.unary_stream(_parse(handler, payload), context):
                yield response
        except Exception as error:
            await _abort(error, context)

    return behaviour


def _both_streaming(handler: Handler) -> Callable[[AsyncIterator[bytes], Any], AsyncIterator[Any]]:
    async def behaviour(payloads: AsyncIterator[bytes], context: Any) -> AsyncIterator[Any]:
        try:
            requests = (_parse(handler, payload) async for payload in payloads)
            async for response in handler.stream_stream(requests, context):
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
        await context.abort(STATUS_CODES[type(error)], str(error), trailing_metadata=status_metadata(error))
    incident = uuid.uuid4().hex[:8]
    log.error("internal error %s", incident, exc_info=error)
    await context.abort(grpc.StatusCode.INTERNAL, f"internal error {incident}; the server's log has the details")
    raise AssertionError("abort always raises")
