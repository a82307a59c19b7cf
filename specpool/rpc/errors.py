"""Maps the errors of `specpool.protocol.errors` to gRPC status codes and error details."""

import asyncio
from typing import Any, TypeAlias

from google.protobuf import any_pb2, duration_pb2, message
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2, status_pb2
from grpc import StatusCode

from specpool.protocol.errors import (
    AlreadyExistsError,
    ExhaustedError,
    InvalidArgumentError,
    NotFoundError,
    PermissionDeniedError,
    QueueFullError,
    ServiceError,
    SlowRequestError,
    StalledStreamError,
    TooManyCallsError,
    UnauthenticatedError,
    UnavailableError,
    UnimplementedError,
    WorkerFailedError,
)

STATUS_CODES: dict[type[ServiceError], StatusCode] = {
    InvalidArgumentError: StatusCode.INVALID_ARGUMENT,
    UnauthenticatedError: StatusCode.UNAUTHENTICATED,
    PermissionDeniedError: StatusCode.PERMISSION_DENIED,
    NotFoundError: StatusCode.NOT_FOUND,
    AlreadyExistsError: StatusCode.ALREADY_EXISTS,
    QueueFullError: StatusCode.RESOURCE_EXHAUSTED,
    StalledStreamError: StatusCode.RESOURCE_EXHAUSTED,
    TooManyCallsError: StatusCode.RESOURCE_EXHAUSTED,
    SlowRequestError: StatusCode.DEADLINE_EXCEEDED,
    UnavailableError: StatusCode.UNAVAILABLE,
    UnimplementedError: StatusCode.UNIMPLEMENTED,
    WorkerFailedError: StatusCode.INTERNAL,
}

_GO_NAMES = {StatusCode.OK: "OK", StatusCode.CANCELLED: "Canceled"}
_NAMES: dict[StatusCode | int | None, str] = {None: "OK"}
for _code in StatusCode:
    _NAMES[_code] = _NAMES[_code.value[0]] = _GO_NAMES.get(_code, _code.name.title().replace("_", ""))

# Bytes of a text in a status. Clients refuse more than 8 KiB of metadata, which has the message three times: with up to
# three characters for each byte, and twice in base64.
MOST_TEXT_BYTES = 1000

STATUS_DETAILS = "grpc-status-details-bin"
"""Key of the `google.rpc.Status` in trailing metadata."""

TrailingMetadata: TypeAlias = tuple[tuple[str, str | bytes], ...]

ANSWERED = ("specpool-answered", "1")
"""In the trailing metadata of every error that a handler of ours ended in: all other errors are those of the transport,
and say nothing about the request."""


def code_name(code: StatusCode | int | None) -> str:
    """The name of a status code in Go, which the metrics of most gRPC servers use. `code`: as the context of a call
    gives it, possibly its number, or None as long as none is set."""
    return _NAMES[code]


def status_of(error: ServiceError) -> tuple[StatusCode, str, TrailingMetadata]:
    """The status in which a call ends: its code, its message, and `google.rpc.Status` in trailing metadata, which is
    empty if there are no details. Long texts are cut."""
    code, text, detail = STATUS_CODES[type(error)], _cut(str(error)), _detail(error)
    if detail is None:
        return code, text, ()
    packed = any_pb2.Any()
    packed.Pack(detail)
    status = status_pb2.Status(code=code.value[0], message=text, details=[packed])
    return code, text, ((STATUS_DETAILS, status.SerializeToString()),)


# Codes of answers that an operator must look into; all others are the caller's doing, or will pass.
_FAULTS = {StatusCode.DEADLINE_EXCEEDED, StatusCode.INTERNAL, StatusCode.UNAVAILABLE}


def error_type(error: BaseException) -> tuple[str, bool]:
    """How traces name an error, and whether it is a fault of the server: the name of the status code for errors that
    clients may see, of the class for others."""
    if isinstance(error, asyncio.CancelledError | GeneratorExit):  # the client has left
        return StatusCode.CANCELLED.name, False
    if isinstance(error, ServiceError):
        code = STATUS_CODES[type(error)]
        return code.name, code in _FAULTS
    return type(error).__name__, True


def retry_delay(error: Any) -> float | None:
    """Seconds after which a call that ended in this `grpc.RpcError` is to be tried again, as its `google.rpc.RetryInfo`
    says; None without one."""
    for key, value in error.trailing_metadata() or ():
        if key != STATUS_DETAILS:
            continue
        try:
            status = status_pb2.Status.FromString(value)
        except DecodeError:
            return None
        for packed in status.details:
            retry = error_details_pb2.RetryInfo()
            if packed.Unpack(retry):
                return float(max(0.0, retry.retry_delay.ToMilliseconds() / 1000))
    return None


def _cut(text: str) -> str:
    encoded = text.encode(errors="replace")
    if len(encoded) <= MOST_TEXT_BYTES:
        return text
    return encoded[:MOST_TEXT_BYTES].decode(errors="ignore") + "..."


def _detail(error: ServiceError) -> message.Message | None:
    """The message of `google.rpc` that says the same for programs."""
    detail: message.Message | None = None
    if isinstance(error, InvalidArgumentError):
        violation = error_details_pb2.BadRequest.FieldViolation(field=_cut(error.field), description=_cut(error.reason))
        detail = error_details_pb2.BadRequest(field_violations=[violation])
    elif isinstance(error, ExhaustedError):
        delay = duration_pb2.Duration()
        delay.FromMilliseconds(round(error.retry_seconds * 1000))
        detail = error_details_pb2.RetryInfo(retry_delay=delay)
    return detail
