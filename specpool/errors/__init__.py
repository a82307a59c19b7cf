"""Exceptions of both clients.

SpecpoolError
├── RequestError                     a call failed
│   ├── InvalidArgumentError         a field is invalid: `field`, `reason`, `limit`
│   ├── UnauthenticatedError         the token is missing or unknown
│   ├── PermissionDeniedError        the client is known but not allowed
│   ├── NotFoundError                no such request
│   ├── AlreadyExistsError           a request with this id is in flight
│   ├── ResourceExhaustedError       a limit of the server is reached: `retry_after`
│   │   └── QueueFullError           too many requests are waiting
│   ├── DeadlineExceededError        the call's deadline has passed
│   ├── CallCancelledError           the call was cancelled, such as by closing the client
│   ├── UnimplementedError           the server does not support this
│   ├── UnavailableError             the server cannot serve now, or the connection broke
│   │   └── ConnectError             no connection to the server
│   │       ├── ResolveError         the host name does not exist
│   │       ├── ProtocolError        the server requires TLS, does not use it, or is no gRPC server
│   │       └── CertificateError     the server's certificate is invalid, or it refuses the client's
│   └── ServerError                  the server failed
├── NotReadyError                    the server failed to start, or was not ready in time
└── DivergedError                    a resumed stream has other tokens

The clients retry an UnavailableError and a ResourceExhaustedError for `retry_seconds`, but neither a ProtocolError nor
a CertificateError nor a limit without `retry_after`.
"""

from collections.abc import Iterable
from typing import Any

import grpc

__all__ = [
    "AlreadyExistsError",
    "CallCancelledError",
    "CertificateError",
    "ConnectError",
    "DeadlineExceededError",
    "DivergedError",
    "InvalidArgumentError",
    "NotFoundError",
    "NotReadyError",
    "PermissionDeniedError",
    "ProtocolError",
    "QueueFullError",
    "RequestError",
    "ResolveError",
    "ResourceExhaustedError",
    "ServerError",
    "SpecpoolError",
    "UnauthenticatedError",
    "UnavailableError",
    "UnimplementedError",
]


class SpecpoolError(Exception):
    """Base class of all exceptions of the clients."""


class RequestError(SpecpoolError, grpc.aio.AioRpcError):
    """A call failed. `code()` is its gRPC status, `details()` the message, `__cause__` the original `grpc.RpcError`.

    Also a `grpc.RpcError` and, for both clients, a `grpc.aio.AioRpcError`, so that code written for gRPC catches it.
    """

    def __init__(
        self, message: str, code: grpc.StatusCode, trailing_metadata: Iterable[tuple[str, str | bytes]] = ()
    ) -> None:
        metadata = grpc.aio.Metadata(*((key, value) for key, value in trailing_metadata))
        super().__init__(code, grpc.aio.Metadata(), metadata, message)
        self.args = (message, code, tuple(metadata))

    def __str__(self) -> str:
        return f"{self.code().name}: {self.details()}"

    def __repr__(self) -> str:
        return f"{type(self).__name__}({str(self)!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), self.args, self.__dict__


class InvalidArgumentError(RequestError):
    """A field of the request is invalid. Attributes that the server did not send are empty."""

    field: str = ""
    """Path of the field, such as "sampling_params.max_tokens"."""
    reason: str = ""
    """The rule that the field breaks."""
    limit: float | None = None
    """The number that the field must not exceed or fall below, if the rule has one."""


class UnauthenticatedError(RequestError):
    """The token is missing or unknown."""


class PermissionDeniedError(RequestError):
    """The client is known but not allowed."""


class NotFoundError(RequestError):
    """The client has no request with this id in flight."""


class AlreadyExistsError(RequestError):
    """The client has a request with this id in flight."""


class ResourceExhaustedError(RequestError):
    """A limit of the server is reached."""

    retry_after: float | None = None
    """Seconds after which the server suggests a retry. None: a retry does not help."""


class QueueFullError(ResourceExhaustedError):
    """Too many requests are waiting."""


class DeadlineExceededError(RequestError):
    """The call's deadline has passed."""


class CallCancelledError(RequestError):
    """The call was cancelled: the client was closed, or the server or a proxy ended the call."""


class UnimplementedError(RequestError):
    """The server does not support this method or feature."""


class UnavailableError(RequestError):
    """The server cannot serve now, or the connection broke."""


class ConnectError(UnavailableError):
    """No connection to the server."""


class ResolveError(ConnectError):
    """The host name of the address does not exist."""


class ProtocolError(ConnectError):
    """The server requires TLS, does not use it, or is no gRPC server. Not retried."""


class CertificateError(ConnectError):
    """The server's certificate is invalid for this client, or the server refuses the client's. Not retried."""


class ServerError(RequestError):
    """The server failed, or ended the call with a status that Specpool does not use."""


class NotReadyError(SpecpoolError):
    """The server failed to start, or was not ready in time. The message says why."""


class DivergedError(SpecpoolError):
    """A repeated request gave different tokens: the target model has changed, or is not bitwise exact."""
