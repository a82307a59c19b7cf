"""Errors whose message may be shown to a client. `specpool.rpc.status` maps them to gRPC status codes.

ServiceError
├── InvalidArgumentError    a field is wrong; names it
├── UnauthenticatedError    the caller has no token that is known
├── PermissionDeniedError   the caller is known, and not allowed
├── NotFoundError           no such request
├── AlreadyExistsError      a request with that id is in flight
├── StalledStreamError      the client does not read what it asked for
├── ExhaustedError          a bound is reached; says when to try again
│   ├── QueueFullError      too many requests are waiting
│   └── TooManyCallsError   too many calls, or too large ones, are in progress
├── SlowRequestError        a request takes too long to arrive
├── UnavailableError        a worker or the server cannot serve now
├── UnimplementedError      the server does not offer this
└── WorkerFailedError       a worker still fails after retries
"""


class ServiceError(Exception):
    """An error whose message may be shown to a client."""

    @property
    def logged(self) -> str:
        """The message for the log, without any text of a client."""
        return str(self)


class InvalidArgumentError(ServiceError):
    """`field` (a path such as "sampling_params.max_tokens") breaks the rule that `reason` states.

    `may_quote`: whether the reason may contain text of the client, and is for the client alone.
    """

    def __init__(self, field: str, reason: str, may_quote: bool = False) -> None:
        super().__init__(f"{field}: {reason}")
        self.field, self.reason = field, reason
        self._may_quote = may_quote

    @property
    def logged(self) -> str:
        return f"{self.field}: refused" if self._may_quote else str(self)


class UnauthenticatedError(ServiceError):
    """The caller does not say who it is, or cannot prove it."""


class PermissionDeniedError(ServiceError):
    """The caller may not do this."""


class NotFoundError(ServiceError):
    """The request names something that does not exist."""


class AlreadyExistsError(ServiceError):
    """The request would create something that already exists."""


class ExhaustedError(ServiceError):
    """A bound is reached; try again after `retry_seconds`."""

    def __init__(self, reason: str, retry_seconds: float) -> None:
        super().__init__(reason)
        self.retry_seconds = retry_seconds


class StalledStreamError(ServiceError):
    """The client has not read its stream for so long that what is kept for it is given to others."""


class QueueFullError(ExhaustedError):
    """The queue has no capacity for another request."""


class TooManyCallsError(ExhaustedError):
    """The server or the client has too many calls in progress, or requests of too many bytes."""


class SlowRequestError(ServiceError):
    """A request takes too long to arrive."""


class UnavailableError(ServiceError):
    """The server cannot serve now, but may soon."""


class UnimplementedError(ServiceError):
    """The server does not offer this, whatever the request says."""


class WorkerFailedError(ServiceError):
    """A worker still fails after retries."""
