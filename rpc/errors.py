"""What can go wrong for a client, and the one table that turns it into gRPC status codes.

ServiceError
├── InvalidArgumentError    a field is wrong; names it
├── NotFoundError           no such request
├── AlreadyExistsError      a request of that id is in flight
├── QueueFullError          too many requests wait; says when to try again
├── UnavailableError        a worker or the server cannot serve now
└── WorkerFailedError       a worker failed in a way that trying again did not mend
"""

from google.protobuf import any_pb2, duration_pb2, message
from google.rpc import error_details_pb2, status_pb2
from grpc import StatusCode


class ServiceError(Exception):
    """An error whose message may be shown to a client."""

    def details(self) -> list[message.Message]:
        """Messages of `google.rpc` that say the same for programs."""
        return []


class InvalidArgumentError(ServiceError):
    """`field` (a path such as "sampling_params.max_tokens") breaks the rule that `reason` states."""

    def __init__(self, field: str, reason: str) -> None:
        super().__init__(f"{field}: {reason}")
        self.field, self.reason = field, reason

    def details(self) -> list[message.Message]:
        violation = error_details_pb2.BadRequest.FieldViolation(field=self.field, description=self.reason)
        return [error_details_pb2.BadRequest(field_violations=[violation])]


class NotFoundError(ServiceError):
    """What the request names does not exist."""


class AlreadyExistsError(ServiceError):
    """What the request would create exists."""


class QueueFullError(ServiceError):
    """No room for another request; try again after `retry_seconds`."""

    def __init__(self, reason: str, retry_seconds: float) -> None:
        super().__init__(reason)
        self.retry_seconds = retry_seconds

    def details(self) -> list[message.Message]:
        delay = duration_pb2.Duration()
        delay.FromMilliseconds(round(self.retry_seconds * 1000))
        return [error_details_pb2.RetryInfo(retry_delay=delay)]


class UnavailableError(ServiceError):
    """The server cannot serve now, but may soon."""


class WorkerFailedError(ServiceError):
    """A worker failed again and again."""


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
    packed = []
    for detail in error.details():
        packed.append(any_pb2.Any())
        packed[-1].Pack(detail)
    if not packed:
        return ()
    status = status_pb2.Status(code=STATUS_CODES[type(error)].value[0], message=str(error), details=packed)
    return (("grpc-status-details-bin", status.SerializeToString()),)
