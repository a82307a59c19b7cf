"""Converts gRPC errors to the exceptions of `specpool.errors`."""

import asyncio
import re
from typing import Any

import grpc

from specpool.errors import (
    AlreadyExistsError,
    CallCancelledError,
    CertificateError,
    DeadlineExceededError,
    InvalidArgumentError,
    NotFoundError,
    PermissionDeniedError,
    ProtocolError,
    QueueFullError,
    RequestError,
    ResolveError,
    ResourceExhaustedError,
    ServerError,
    UnauthenticatedError,
    UnavailableError,
    UnimplementedError,
)
from specpool.rpc.security.channel import Connector
from specpool.rpc.security.diagnosis import diagnose
from specpool.rpc.status import ANSWERED, QUEUE_FULL, details_of

_ERRORS: dict[grpc.StatusCode, type[RequestError]] = {
    grpc.StatusCode.INVALID_ARGUMENT: InvalidArgumentError,
    grpc.StatusCode.UNAUTHENTICATED: UnauthenticatedError,
    grpc.StatusCode.PERMISSION_DENIED: PermissionDeniedError,
    grpc.StatusCode.NOT_FOUND: NotFoundError,
    grpc.StatusCode.ALREADY_EXISTS: AlreadyExistsError,
    grpc.StatusCode.RESOURCE_EXHAUSTED: ResourceExhaustedError,
    grpc.StatusCode.DEADLINE_EXCEEDED: DeadlineExceededError,
    grpc.StatusCode.CANCELLED: CallCancelledError,
    grpc.StatusCode.UNIMPLEMENTED: UnimplementedError,
    grpc.StatusCode.UNAVAILABLE: UnavailableError,
    grpc.StatusCode.UNKNOWN: UnavailableError,  # a proxy has lost the server, which never sends this code
}
"""All other status codes become a ServerError."""

_PERMANENT = (
    ProtocolError,
    CertificateError,
    ResolveError,
    UnauthenticatedError,
    PermissionDeniedError,
    UnimplementedError,
)


_TOO_LARGE = re.compile(r"SERVER: Received message larger than max \((\d+) vs\. (\d+)\)")
"""The gRPC library's own refusal of a request, which carries no error details."""


def is_permanent(error: RequestError) -> bool:
    """Return whether waiting for the server to start is pointless. Includes unknown host names, which calls retry."""
    return isinstance(error, _PERMANENT)


def failure(error: Any, connector: Connector) -> RequestError:
    """Return the exception for a `grpc.RpcError`, which becomes its `__cause__`.

    If there is no connection, block for up to a few seconds to find out why.
    """
    trailing_metadata = error.trailing_metadata() or ()
    kind, message = _ERRORS.get(error.code(), ServerError), error.details() or ""
    if kind is UnavailableError and ANSWERED not in [*trailing_metadata] and (fault := diagnose(connector)) is not None:
        kind, message = fault
    if sizes := _TOO_LARGE.fullmatch(message):
        message = f"the request has {sizes[1]} bytes, more than the server's --max-request-bytes, {sizes[2]}"
    details = details_of(error)
    if kind is ResourceExhaustedError and details.reason == QUEUE_FULL:
        kind = QueueFullError
    failed = kind(message, error.code(), trailing_metadata)
    if isinstance(failed, InvalidArgumentError):
        failed.field, failed.reason, failed.limit = details.field, details.rule, details.limit
    elif isinstance(failed, ResourceExhaustedError):
        failed.retry_after = details.retry_seconds
    failed.__cause__ = error
    return failed


async def async_failure(error: Any, connector: Connector) -> RequestError:
    """Return `failure(error, connector)` without blocking the event loop."""
    return await asyncio.to_thread(failure, error, connector)
