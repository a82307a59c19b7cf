"""gRPC statuses: the table of errors and status codes, error details, and the status as clients read it."""

import asyncio
from dataclasses import dataclass
from typing import Any, TypeAlias

import grpc
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

# Status codes that operators must look into. The others are caused by clients, or are transient.
_SERVER_FAULTS = {StatusCode.DEADLINE_EXCEEDED, StatusCode.INTERNAL, StatusCode.UNAVAILABLE}

_GO_NAMES = {StatusCode.OK: "OK", StatusCode.CANCELLED: "Canceled"}
_NAMES: dict[StatusCode | int | None, str] = {None: "OK"}
for _code in StatusCode:
    _NAMES[_code] = _NAMES[_code.value[0]] = _GO_NAMES.get(_code, _code.name.title().replace("_", ""))

# Clients reject more than 8 KiB of metadata. The message is sent three times: percent-encoded (up to three characters a
# byte) and twice in base64.
MAX_MESSAGE_BYTES = 1000

STATUS_DETAILS = "grpc-status-details-bin"
"""Trailing metadata key of the `google.rpc.Status`."""

ERROR_DOMAIN = "specpool"
QUEUE_FULL = "QUEUE_FULL"
"""`reason` of the `google.rpc.ErrorInfo` of a QueueFullError."""
_REASONS: dict[type[ServiceError], str] = {
    InvalidArgumentError: "INVALID_FIELD",
    QueueFullError: QUEUE_FULL,
    TooManyCallsError: "TOO_MANY_CALLS",
}
_LIMIT = "limit"

TrailingMetadata: TypeAlias = tuple[tuple[str, str | bytes], ...]

ANSWERED = ("specpool-answered", "1")
"""Trailing metadata of errors raised by handlers. Other errors come from the transport or from authentication, and say
nothing about the request."""


def code_name(code: StatusCode | int | None) -> str:
    """Return Go's name of a status code, which the metrics of most gRPC servers use. None counts as OK."""
    return _NAMES[code]


def status_of(error: ServiceError) -> tuple[StatusCode, str, TrailingMetadata]:
    """Return the status of an error: code, message and error details as trailing metadata. Long texts are truncated."""
    code, text = STATUS_CODES[type(error)], _truncate(str(error))
    status = status_pb2.Status(code=code.value[0], message=text)
    for detail in _details(error):
        packed = any_pb2.Any()
        packed.Pack(detail)
        status.details.append(packed)
    return code, text, ((STATUS_DETAILS, status.SerializeToString()),) if status.details else ()


def status_line(error: grpc.RpcError) -> str:
    """Return the name of the status code and the server's message."""
    return f"{error.code().name}: {error.details()}"


def error_type(error: BaseException) -> tuple[str, bool]:
    """Return the error type for traces, and whether the server is at fault.

    The type is the name of the status code for a `ServiceError`, otherwise the name of the class.
    """
    if isinstance(error, asyncio.CancelledError | GeneratorExit):  # the client disconnected
        return StatusCode.CANCELLED.name, False
    if isinstance(error, ServiceError):
        code = STATUS_CODES[type(error)]
        return code.name, code in _SERVER_FAULTS
    return type(error).__name__, True


@dataclass
class StatusDetails:
    """The `google.rpc` details of an error. Details that the server did not send keep their defaults."""

    field: str = ""
    """Path of the invalid field."""
    rule: str = ""
    """The rule that the field breaks."""
    limit: float | None = None
    """The number in this rule."""
    reason: str = ""
    """`reason` of the `ErrorInfo`, such as QUEUE_FULL."""
    retry_seconds: float | None = None


def details_of(error: Any) -> StatusDetails:
    """Return the `google.rpc` details of a `grpc.RpcError`. Malformed details are ignored."""
    details = StatusDetails()
    payload = dict(error.trailing_metadata() or ()).get(STATUS_DETAILS, b"")
    violations, info = error_details_pb2.BadRequest(), error_details_pb2.ErrorInfo()
    retry = error_details_pb2.RetryInfo()
    try:
        for packed in status_pb2.Status.FromString(payload).details:
            if packed.Unpack(violations) and violations.field_violations:
                first = violations.field_violations[0]
                details.field, details.rule = first.field, first.description
            elif packed.Unpack(info) and info.domain == ERROR_DOMAIN:
                details.reason, details.limit = info.reason, _number(info.metadata.get(_LIMIT, ""))
            elif packed.Unpack(retry):
                details.retry_seconds = max(0.0, retry.retry_delay.ToMilliseconds() / 1000)
    except DecodeError:
        return StatusDetails()
    return details


def _number(text: str) -> float | None:
    try:
        number = float(text)
    except ValueError:
        return None
    return int(number) if number.is_integer() else number


def _truncate(text: str) -> str:
    encoded = text.encode(errors="replace")
    if len(encoded) <= MAX_MESSAGE_BYTES:
        return text
    return encoded[:MAX_MESSAGE_BYTES].decode(errors="ignore") + "..."


def _details(error: ServiceError) -> list[message.Message]:
    """Return the machine-readable `google.rpc` details of an error."""
    details: list[message.Message] = []
    if isinstance(error, InvalidArgumentError):
        field, reason = _truncate(error.field), _truncate(error.reason)
        violation = error_details_pb2.BadRequest.FieldViolation(field=field, description=reason)
        details.append(error_details_pb2.BadRequest(field_violations=[violation]))
    elif isinstance(error, ExhaustedError):
        delay = duration_pb2.Duration()
        delay.FromMilliseconds(round(error.retry_seconds * 1000))
        details.append(error_details_pb2.RetryInfo(retry_delay=delay))
    if (name := _REASONS.get(type(error))) is not None:
        limit = error.limit if isinstance(error, InvalidArgumentError) else None
        metadata = {_LIMIT: str(limit)} if limit is not None else {}
        details.append(error_details_pb2.ErrorInfo(reason=name, domain=ERROR_DOMAIN, metadata=metadata))
    return details
