"""Bounds of a server's calls: how many are in progress, and how much of their requests is in memory.

A request is read when the bounds allow it, not when it arrives: until then gRPC holds a flow-control window of it.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any, Self, TypeVar

from google.protobuf.message import Message

from specpool.protocol.errors import InvalidArgumentError, SlowRequestError, TooManyCallsError
from specpool.rpc.config.settings import ServerSettings
from specpool.rpc.server.callers import client_of

REQUESTS_READ_AT_ONCE = 16
REQUESTS_READ_AT_ONCE_PER_CLIENT = 4
# A request that takes longer to arrive leaves its place to the next one and counts as slow; beyond the number of slow
# ones, the slowest is ended. So clients that send nothing, or nothing more, hold up nobody, and memory is bounded.
PLACE_SECONDS, MOST_SLOW_REQUESTS = 0.25, 64
# Calls of health and reflection have bounds of their own, so that no flood of requests holds up a health check.
HEALTH_CALLS_PER_CLIENT, HEALTH_RECEIVE_SECONDS = 256, 1.0
# For a client that has nothing in progress, the limits of all clients together are larger by this factor, so that no
# other client can use them up.
NEWCOMERS = 2
# Delay after which a refused client is told to try again.
RETRY_AFTER_SECONDS = 1.0
# A call that its client cancelled, or whose request is too large, is ended by gRPC within this time.
ENDING_SECONDS = 1.0
# Most memory that protobuf takes for an element of a repeated field: an empty one has two bytes on the wire.
MESSAGE_BYTES, SCALAR_BYTES = 64, 16

T = TypeVar("T")


@dataclass(frozen=True)
class CallLimits:
    """Limits of the calls in progress. `specpool.rpc.server.callers.client_of` says which client a call belongs to."""

    calls: int
    calls_per_client: int
    memory: int
    """Bytes that the requests and responses of all calls in progress may take."""
    receive_seconds: float
    """Time for a request to arrive."""

    @classmethod
    def of_services(cls, settings: ServerSettings) -> Self:
        """The limits that a server's settings name."""
        per_client = settings.max_calls_per_client or settings.max_calls
        return cls(settings.max_calls, per_client, settings.request_memory, settings.receive_seconds)

    @classmethod
    def of_health(cls, settings: ServerSettings) -> Self:
        """The limits of the calls of health and reflection."""
        return cls(settings.max_calls, HEALTH_CALLS_PER_CLIENT, settings.request_memory, HEALTH_RECEIVE_SECONDS)


@dataclass
class _Client:
    calls: int = 0
    memory: int = 0
    reading: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(REQUESTS_READ_AT_ONCE_PER_CLIENT))


@dataclass(eq=False)
class Call:
    """A call in progress."""

    client: _Client
    task: asyncio.Task[Any]
    memory: int = 0


class Calls:
    """The calls in progress, each until its client has got the whole answer."""

    def __init__(self, limits: CallLimits) -> None:
        self.idle = asyncio.Event()
        """Set while no call is in progress."""
        self.idle.set()
        self.cut_off = False
        """Whether the calls were told to end."""
        self._limits = limits
        self._clients: dict[str, _Client] = {}
        self._calls: set[Call] = set()
        self._memory = 0
        self._reading = asyncio.Semaphore(REQUESTS_READ_AT_ONCE)
        self._slow: dict[asyncio.Timeout, None] = {}
        """The time limits of the requests that have left their places, the slowest first."""

    def begin(self, context: Any) -> Call:
        """Counts the call of the running task as in progress. TooManyCallsError."""
        name = client_of(context)
        is_new = name not in self._clients
        if len(self._calls) >= self._limits.calls * (NEWCOMERS if is_new else 1):
            raise _too_many(f"the server has {len(self._calls)} calls in progress (max_calls)")
        client = self._clients.setdefault(name, _Client())
        if client.calls >= self._limits.calls_per_client:
            raise _too_many(f"the client has {client.calls} calls in progress (max_calls_per_client)")
        task = asyncio.current_task()
        assert task is not None
        call = Call(client, task)
        client.calls += 1
        self._calls.add(call)
        self.idle.clear()
        context.add_done_callback(lambda _: self._end(name, call))
        return call

    def _end(self, name: str, call: Call) -> None:
        self._calls.discard(call)
        self._hold(call, -call.memory)
        call.client.calls -= 1
        if not call.client.calls:
            del self._clients[name]
        if not self._calls:
            self.idle.set()

    def cancel(self) -> None:
        """Tells all calls to end."""
        self.cut_off = True
        for call in self._calls:
            call.task.cancel()

    async def read(self, call: Call, messages: AsyncIterator[bytes], parse: Callable[[bytes], T]) -> T:
        """The one request of a call. TooManyCallsError, SlowRequestError, InvalidArgumentError; what `parse` raises."""
        payload = await self._payload(call.client, await self._place(call.client), messages)
        if payload is None:
            await asyncio.sleep(ENDING_SECONDS)
            raise InvalidArgumentError("request", "the call has no request")
        request = parse(payload)
        needed = memory_of(request, len(payload))
        self._require_memory(call.client, needed)
        self._hold(call, needed)
        return request

    def answer(self, call: Call, response: Any) -> None:
        """Notes the response of a call, which is in memory until the client has read it."""
        if isinstance(response, Message) and call in self._calls:
            self._hold(call, response.ByteSize())

    def _hold(self, call: Call, memory: int) -> None:
        call.memory += memory
        call.client.memory += memory
        self._memory += memory

    async def _payload(self, client: _Client, place: "_Place", messages: AsyncIterator[bytes]) -> bytes | None:
        """The next message, in time; None if there is none."""
        seconds, ending = self._limits.receive_seconds, None
        try:
            self._require_memory(client, 0)
            async with asyncio.timeout(seconds) as limit:
                ending = asyncio.get_running_loop().call_later(PLACE_SECONDS, self._leave_place, place, limit)
                return await anext(messages, None)
        except TimeoutError:
            raise SlowRequestError(f"the request did not arrive in {seconds:g} s (receive_seconds)") from None
        finally:
            place.leave()
            if ending is not None:
                ending.cancel()
                self._slow.pop(limit, None)

    def _leave_place(self, place: "_Place", limit: asyncio.Timeout) -> None:
        place.leave()
        self._slow[limit] = None
        if len(self._slow) > MOST_SLOW_REQUESTS:
            slowest = next(iter(self._slow))
            del self._slow[slowest]
            slowest.reschedule(asyncio.get_running_loop().time())

    def _require_memory(self, client: _Client, needed: int) -> None:
        most = self._limits.memory * (1 if client.memory else NEWCOMERS)
        if self._memory and self._memory + needed >= most:  # one alone is always served
            raise _too_many(
                f"the requests in progress take {self._memory} of {self._limits.memory} bytes (request_memory)"
            )

    async def _place(self, client: _Client) -> "_Place":
        """The place of one of the few requests that are read at a time. TooManyCallsError if none is free in time."""
        seconds = self._limits.receive_seconds
        try:
            async with asyncio.timeout(seconds):
                await client.reading.acquire()
                try:
                    await self._reading.acquire()
                except BaseException:
                    client.reading.release()
                    raise
        except TimeoutError:
            reason = f"requests are arriving too slowly for another to be read within {seconds:g} s (receive_seconds)"
            raise _too_many(reason) from None
        return _Place(self._reading, client.reading)


class _Place:
    """A place of a request that is being read, which can be left once."""

    def __init__(self, *semaphores: asyncio.Semaphore) -> None:
        self._held = semaphores

    def leave(self) -> None:
        """Leaves it to the next request."""
        held, self._held = self._held, ()
        for semaphore in held:
            semaphore.release()


def memory_of(request: object, size: int) -> int:
    """Bytes that a request of `size` bytes takes, at most: many small elements take more than on the wire."""
    return size + (_elements_memory(request) if isinstance(request, Message) else 0)


def _elements_memory(message: Message) -> int:
    total = 0
    for descriptor, value in message.ListFields():
        if descriptor.is_repeated:
            total += len(value) * (MESSAGE_BYTES if descriptor.message_type else SCALAR_BYTES)
        elif descriptor.message_type:
            total += _elements_memory(value)
    return total


def _too_many(reason: str) -> TooManyCallsError:
    return TooManyCallsError(reason, RETRY_AFTER_SECONDS)
