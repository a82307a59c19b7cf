"""Limits on the calls in progress and on the memory of their requests.

A request is read when the limits allow it, not when it arrives. Until then gRPC holds one flow-control window of it.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Collection, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, Self, TypeVar

from google.protobuf.message import Message

from specpool.protocol.errors import InvalidArgumentError, SlowRequestError, TooManyCallsError
from specpool.rpc.config.settings import ServerSettings
from specpool.rpc.server.callers import client_of

MAX_CONCURRENT_READS = 16
MAX_CONCURRENT_READS_PER_CLIENT = 4
# A request that is still arriving after this time gives up its read slot and counts as slow. Beyond the maximum number
# of slow requests, the slowest fails. Idle senders therefore block nobody, and memory stays bounded.
READ_SLOT_SECONDS, MAX_SLOW_REQUESTS = 0.25, 64
# Health and reflection have limits of their own, so that a flood of requests cannot delay a health check.
HEALTH_CALLS_PER_CLIENT, HEALTH_RECEIVE_SECONDS = 256, 1.0
# Factor on the shared limits for a client with no calls in progress, so that other clients cannot lock it out.
NEW_CLIENT_FACTOR = 2
# Retry delay for refused clients.
RETRY_AFTER_SECONDS = 1.0
# gRPC ends a cancelled call, or one whose request is too large, within this time.
ENDING_SECONDS = 1.0
# Upper bounds on protobuf's memory for a message and for an element of a repeated scalar field.
MESSAGE_BYTES, SCALAR_BYTES = 128, 16
# An empty message takes two bytes on the wire.
MAX_GROWTH = MESSAGE_BYTES // 2
# Maximum number of messages within a request that are looked at one by one.
MAX_VISITED = 4096

T = TypeVar("T")


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
    def of_services(cls, settings: ServerSettings) -> Self:
        """Limits of all services except health and reflection."""
        per_client = settings.max_calls_per_client or settings.max_calls
        return cls(settings.max_calls, per_client, settings.request_memory, settings.receive_seconds)

    @classmethod
    def of_health(cls, settings: ServerSettings) -> Self:
        return cls(settings.max_calls, HEALTH_CALLS_PER_CLIENT, settings.request_memory, HEALTH_RECEIVE_SECONDS)


@dataclass
class _Client:
    calls: int = 0
    memory: int = 0
    reading: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(MAX_CONCURRENT_READS_PER_CLIENT))


@dataclass(eq=False)
class Call:
    """A call in progress."""

    client: _Client
    task: asyncio.Task[Any]
    memory: int = 0


class Calls:
    """The calls in progress. A call ends when its client has received the whole response."""

    def __init__(self, limits: CallLimits) -> None:
        self.idle = asyncio.Event()
        """Set while no call is in progress."""
        self.idle.set()
        self.cut_off = False
        """Whether all calls have been cancelled."""
        self._limits = limits
        self._clients: dict[str, _Client] = {}
        self._calls: set[Call] = set()
        self._memory = 0
        self._reading = asyncio.Semaphore(MAX_CONCURRENT_READS)
        self._slow: dict[asyncio.Timeout, None] = {}
        """Timeouts of the slow requests, slowest first."""

    def begin(self, context: Any) -> Call:
        """Count the call of the running task as in progress. Raises TooManyCallsError."""
        name = client_of(context)
        is_new = name not in self._clients
        if len(self._calls) >= self._limits.calls * (NEW_CLIENT_FACTOR if is_new else 1):
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
        self.cut_off = True
        for call in self._calls:
            call.task.cancel()

    async def read(self, call: Call, messages: AsyncIterator[bytes], parse: Callable[[bytes], T]) -> T:
        """Read the single request of a call.

        Raises TooManyCallsError, SlowRequestError, InvalidArgumentError, and the errors of `parse`.
        """
        payload = await self._payload(call.client, await self._read_slot(call.client), messages)
        if payload is None:
            await asyncio.sleep(ENDING_SECONDS)
            raise InvalidArgumentError("request", "the call has no request")
        request = parse(payload)
        needed = memory_of(request, len(payload))
        self._check_memory(call.client, needed)
        self._hold(call, needed)
        return request

    def hold_response(self, call: Call, response: Any) -> None:
        """Count the memory of a response until the client has read it."""
        if isinstance(response, Message) and call in self._calls:
            self._hold(call, response.ByteSize())

    def _hold(self, call: Call, memory: int) -> None:
        call.memory += memory
        call.client.memory += memory
        self._memory += memory

    async def _payload(self, client: _Client, slot: ExitStack, messages: AsyncIterator[bytes]) -> bytes | None:
        """Return the next message, or None at the end of the stream. Raises SlowRequestError."""
        seconds, slow_timer = self._limits.receive_seconds, None
        try:
            self._check_memory(client, 0)
            async with asyncio.timeout(seconds) as timeout:
                slow_timer = asyncio.get_running_loop().call_later(READ_SLOT_SECONDS, self._mark_slow, slot, timeout)
                return await anext(messages, None)
        except TimeoutError:
            raise SlowRequestError(f"the request did not arrive within {seconds:g} s (receive_seconds)") from None
        finally:
            slot.close()
            if slow_timer is not None:
                slow_timer.cancel()
                self._slow.pop(timeout, None)

    def _mark_slow(self, slot: ExitStack, timeout: asyncio.Timeout) -> None:
        slot.close()
        self._slow[timeout] = None
        if len(self._slow) > MAX_SLOW_REQUESTS:
            slowest = next(iter(self._slow))
            del self._slow[slowest]
            slowest.reschedule(asyncio.get_running_loop().time())

    def _check_memory(self, client: _Client, needed: int) -> None:
        limit = self._limits.memory * (1 if client.memory else NEW_CLIENT_FACTOR)
        if self._memory and self._memory + needed >= limit:  # a single request is always served
            used = f"{self._memory} of {self._limits.memory} bytes"
            raise _too_many(f"the requests in progress take {used} (request_memory)")

    async def _read_slot(self, client: _Client) -> ExitStack:
        """Acquire a slot to read a request, until it is closed. Raises TooManyCallsError if none becomes free."""
        seconds = self._limits.receive_seconds
        try:
            async with asyncio.timeout(seconds):
                with ExitStack() as slot:
                    for semaphore in (client.reading, self._reading):
                        await semaphore.acquire()
                        slot.callback(semaphore.release)
                    return slot.pop_all()
        except TimeoutError:
            raise _too_many(f"no request slot became free within {seconds:g} s (receive_seconds)") from None


def memory_of(request: object, size: int) -> int:
    """Return an upper bound on the memory of a request of `size` bytes. Small elements grow when they are parsed."""
    total, messages = size, [request] if isinstance(request, Message) else []
    for message in messages:  # `messages` grows
        for descriptor, value in message.ListFields():
            if descriptor.message_type:
                elements = _elements(value)
                total += MESSAGE_BYTES * len(elements)
                if len(messages) + len(elements) > MAX_VISITED:
                    return size + MAX_GROWTH * size
                messages += [element for element in elements if isinstance(element, Message)]
            elif descriptor.is_repeated:
                total += SCALAR_BYTES * len(value)
    return total


def _elements(value: Any) -> Collection[Any]:
    """Return the messages of a field that holds one, several or a map."""
    if isinstance(value, Message):
        return [value]
    return value.values() if isinstance(value, Mapping) else value


def _too_many(reason: str) -> TooManyCallsError:
    return TooManyCallsError(reason, RETRY_AFTER_SECONDS)
