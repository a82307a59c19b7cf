"""A call in progress, its client's share of the limits, and the end of unread streams."""

import asyncio
import logging
import math
from collections import deque
from collections.abc import Collection
from contextvars import copy_context
from dataclasses import dataclass, field
from typing import Any, Self

import grpc

from specpool.protocol.errors import ServiceError, TooManyCallsError
from specpool.rpc.config.settings import ServerSettings
from specpool.rpc.ports import PORT_CHECK_SECONDS
from specpool.rpc.status import ANSWERED, status_of

log = logging.getLogger(__name__)

MAX_CLIENTS = 1024
"""Number of remembered clients above which stale turns are dropped."""

MAX_CONCURRENT_READS_PER_CLIENT = 4
# gRPC ends a cancelled call, or one whose request is too large, within this time.
ENDING_SECONDS = 1.0
# Retry delay for refused clients.
RETRY_AFTER_SECONDS = 1.0


@dataclass(frozen=True)
class Rates:
    """Rates and times of a server that no setting changes."""

    refusals_per_second: float = 500
    """Calls of a client that are refused for lack of room or lateness. Refusing faster would starve others."""
    max_refusal_seconds: float = 5.0
    """A refusal that would wait for longer is sent at once: every waiting call takes memory."""
    invalid_bytes_per_second: float = 16 * 2**20
    """Bytes of a client's invalid requests that are refused. Refusing faster would starve others."""
    concurrent_reads: int = 16
    read_slot_seconds: float = 0.25
    """A request that is still arriving after this time gives up its read slot and counts as slow."""
    handshake_seconds: int = 10
    idle_connection_seconds: int = 300
    last_calls_seconds: float = 0.5
    """Time for health and reflection calls to end by themselves after the last call of a service."""
    port_check_seconds: float = PORT_CHECK_SECONDS


_ENDING: dict[int, asyncio.Task[None]] = {}
"""Tasks that send a final status, by call identity."""


def fair_share(held: Collection[int], capacity: int) -> int:
    """Return the max-min fair share: clients that hold less keep what they hold, and the others get this much.

    `held`: what each client holds. At least 1.
    """
    remaining = capacity
    for index, count in enumerate(sorted(held)):
        share = remaining // (len(held) - index)
        if count > share:
            return max(1, share)
        remaining -= count
    return capacity


class Pace:
    """Gives each client turns at a limited rate, so that its refusals leave time for others."""

    def __init__(self, per_second: float, max_wait: float = math.inf) -> None:
        """`per_second`: cost of the turns in each second. `max_wait`: maximum seconds to wait for a turn."""
        self._seconds, self._max_wait = 1 / per_second, max_wait
        self._next: dict[str, float] = {}
        """Time of the next turn, by client."""

    async def turn(self, client: str, cost: float = 1) -> None:
        """Wait for the next turn of a client, but not at all if that takes longer than the maximum.

        The turn after it is later, the more this one costs.
        """
        now = asyncio.get_running_loop().time()
        turn = max(now, self._next.get(client, now))
        if turn > now + self._max_wait:
            return
        self._next[client] = turn + cost * self._seconds
        if len(self._next) > MAX_CLIENTS:
            self._next = {client: after for client, after in self._next.items() if after > now}
        if turn > now:
            await asyncio.sleep(turn - now)


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
    name: str
    calls: int = 0
    memory: int = 0
    replaceable: "dict[Call, None]" = field(default_factory=dict)
    """Calls that may be ended in favour of other calls, oldest first."""
    reading: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(MAX_CONCURRENT_READS_PER_CLIENT))


@dataclass(eq=False)
class Call:
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
    return TooManyCallsError(reason, RETRY_AFTER_SECONDS)


class UnreadStream:
    """The stream of the handler that creates this object, which cannot end the call itself while it blocks in a send.

    `end` may be called from any task of the event loop.
    """

    def __init__(self, context: Any) -> None:
        self._context = context
        self._handler = asyncio.current_task()
        self._variables = copy_context()

    def end(self, error: ServiceError) -> None:
        """Cancel the handler. The client gets the error's status once it reads what was already sent."""
        self._variables.run(log.info, "ending a stream of %s: %s", self._context.peer(), error)
        call = id(self._context)
        _ENDING[call] = ending = asyncio.create_task(self._send_status(error))
        ending.add_done_callback(lambda _: _ENDING.pop(call, None))
        if self._handler is not None:  # after the status is on its way: a cancelled call sends none
            asyncio.get_running_loop().call_soon(self._handler.cancel)

    async def _send_status(self, error: ServiceError) -> None:
        code, text, metadata = status_of(error)
        try:
            await self._context.abort(code, text, (*metadata, ANSWERED))
        except grpc.aio.AbortError:
            pass  # sent
        except Exception as failure:  # not even the first message is read, client disconnected, or server stopping
            log.debug("could not send the status of an unread stream: %s", failure)


async def status_sent(context: Any) -> None:
    """Wait until the status of an ended stream is sent, at most until the client disconnects.

    Return at once for other calls.
    """
    if (ending := _ENDING.get(id(context))) is not None:
        await asyncio.wait([ending])
