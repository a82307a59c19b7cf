"""Errors whose message may be shown to a client. `specpool.rpc.status` maps them to gRPC status codes.

A server raises these. A client raises the exceptions of `specpool.errors` instead.

ServiceError
├── InvalidArgumentError    a field is invalid
├── UnauthenticatedError    the caller has no known token
├── PermissionDeniedError   the caller is known but not allowed
├── NotFoundError           no such request
├── AlreadyExistsError      a request with this id is in flight
├── StalledStreamError      the client does not read its stream
├── ExhaustedError          a limit is reached; says when to retry
│   ├── QueueFullError      too many requests are waiting
│   └── TooManyCallsError   too many or too large calls are in progress
├── SlowRequestError        a request takes too long to arrive
├── UnavailableError        a worker or the server cannot serve now
├── UnimplementedError      the server does not support this
└── WorkerFailedError       a worker keeps failing after retries
"""


class ServiceError(Exception):
    """An error whose message may be shown to a client."""

    @property
    def logged(self) -> str:
        """The message for the log, without text from clients."""
        return str(self)


class InvalidArgumentError(ServiceError):
    """A field breaks a rule.

    `field`: path of the field, such as "sampling_params.max_tokens". `reason`: the rule, which may quote the client.
    `limit`: the limit that the field exceeds, if any.
    """

    def __init__(self, field: str, reason: str, limit: float | None = None) -> None:
        super().__init__(f"{field}: {reason}")
        self.field, self.reason, self.limit = field, reason, limit

    @property
    def logged(self) -> str:
        return self.field


class UnauthenticatedError(ServiceError):
    """The caller has no known token."""


class PermissionDeniedError(ServiceError):
    """The caller is known but not allowed."""


class NotFoundError(ServiceError):
    """The requested object does not exist."""


class AlreadyExistsError(ServiceError):
    """The object to create already exists."""


class ExhaustedError(ServiceError):
    """A limit is reached. Retry after `retry_seconds`."""

    def __init__(self, reason: str, retry_seconds: float) -> None:
        super().__init__(reason)
        self.retry_seconds = retry_seconds


class StalledStreamError(ServiceError):
    """The client has not read its stream for too long. Its resources go to others."""


class QueueFullError(ExhaustedError):
    """The queue has no room for another request."""


class TooManyCallsError(ExhaustedError):
    """The server or the client has too many calls in progress, or their requests take too much memory."""


class SlowRequestError(ServiceError):
    """A request takes too long to arrive."""


class UnavailableError(ServiceError):
    """The server cannot serve now, but may soon."""


class UnimplementedError(ServiceError):
    """The server does not support this method or feature."""


class WorkerFailedError(ServiceError):
    """A worker keeps failing after retries."""
