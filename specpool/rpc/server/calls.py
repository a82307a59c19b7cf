"""A call in progress, its client, and the limits on calls."""

import asyncio
from collections import deque
from dataclasses import dataclass, field
from typing import Any, Self

from specpool.protocol.errors import ServiceError, TooManyCallsError
from specpool.rpc.config.settings import ServerSettings

MAX_CONCURRENT_READS_PER_CLIENT = 4
# gRPC ends a cancelled call, or one whose request is too large, within this time.
ENDING_SECONDS = 1.0
# Retry delay for refused clients.
RETRY_AFTER_SECONDS = 1.0


@dataclass(frozen=True)
class CallLimits:
    """Limits on the calls in progress."""

    calls: int
    calls_per_client: int
    memory: int
    """Bytes of the requests and responses of all calls."""
    receive_seconds: float
    """Time for a request to arrive."""

    @classmethod
    def of(cls, settings: ServerSettings) -> Self:
        return cls(
            settings.max_calls,
            settings.max_calls_per_client or settings.max_calls,
            settings.request_memory,
            settings.receive_seconds,
        )


@dataclass(eq=False)
class Client:
    """A client's calls and memory."""

    name: str
    calls: int = 0
    memory: int = 0
    replaceable: "dict[Call, None]" = field(default_factory=dict)
    """Calls that may be ended in favour of other calls, oldest first."""
    reading: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(MAX_CONCURRENT_READS_PER_CLIENT))


@dataclass(eq=False)
class Call:
    """A call in progress."""

    client: Client
    context: Any
    task: asyncio.Task[Any]
    drains: bool = True
    """Whether a drain waits for it."""
    memory: int = 0
    size: int = 0
    """Bytes of its single request."""
    unanswered: deque[int] = field(default_factory=deque)
    """Memory of each request of a stream without a response."""
    error: ServiceError | None = None
    """Why the server cancelled its task."""
    is_answered: bool = False
    """Whether gRPC has its unary answer."""

    def end(self, error: ServiceError) -> None:
        """End the call. The client gets the error if it reads."""
        self.client.replaceable.pop(self, None)
        if not self.is_answered and self.error is None:
            self.error = error
            self.task.cancel()


def too_many(reason: str) -> TooManyCallsError:
    """Return the error of a refused call."""
    return TooManyCallsError(reason, RETRY_AFTER_SECONDS)
