"""The one table that turns the errors of `protocol.errors` into gRPC status codes, and their details for programs."""

from google.protobuf import any_pb2, duration_pb2, message
from google.rpc import error_details_pb2, status_pb2
from grpc import StatusCode

from protocol.errors import (
    AlreadyExistsError,
    InvalidArgumentError,
    NotFoundError,
    QueueFullError,
    ServiceError,
    UnavailableError,
    WorkerFailedError,
)

STATUS_CODES: dict[type[ServiceError], StatusCode] = {
    InvalidArgumentError: StatusCode.INVALID_ARGUMENT,
    NotFoundError: StatusCode.NOT_FOUND,
    AlreadyExistsError: StatusCode.ALREADY_EXISTS,
    QueueFullError: StatusCode.RESOURCE_EXHAUSTED,
    UnavailableError: StatusCode.UNAVAILABLE,
    WorkerFailedError: StatusCode.INTERNAL,
}


def status_metadata(error: ServiceError) -> tuple[tuple[str, bytes], ...]:
    """The trailing metadata in which gRPC carries `google.rpc.Status` details; empty without details."""
    detail = _detail(error)
    if detail is None:
        return ()
    packed = any_pb2.Any()
    packed.Pack(detail)
    status = status_pb2.Status(code=STATUS_CODES[type(error)].value[0], message=str(error), details=[packed])
    return (("grpc-status-details-bin", status.SerializeToString()),)


def _detail(error: ServiceError) -> message.Message | None:
    """The message of `google.rpc` that says the same for programs."""
    detail: message.Message | None = None
    if isinstance(error, InvalidArgumentError):
        violation = error_details_pb2.BadRequest.FieldViolation(field=error.field, description=error.reason)
        detail = error_details_pb2.BadRequest(field_violations=[violation])
    elif isinstance(error, QueueFullError):
        delay = duration_pb2.Duration()
        delay.FromMilliseconds(round(error.retry_seconds * 1000))
        detail = error_details_pb2.RetryInfo(retry_delay=delay)
    return detail
