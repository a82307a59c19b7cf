"""Limits on the calls in progress, on their requests' memory and on unread answers, and the share of each client.

A request is read when the limits allow it, not when it arrives. Until then gRPC holds one flow-control window of it.
"""

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import ExitStack, suppress
from typing import Any, TypeVar

from specpool.protocol.errors import InvalidArgumentError, SlowRequestError, UnavailableError
from specpool.rpc.server.callers import client_of
from specpool.rpc.server.calls import ENDING_SECONDS, Call, CallLimits, Client, Pace, Rates, fair_share, too_many
from specpool.rpc.server.message_memory import MAX_GROWTH, SCALAR_BYTES, RequestParser

# Beyond the maximum number of slow requests, the slowest one of the client with most of them fails. Idle senders
# therefore block nobody, and memory stays bounded.
MAX_SLOW_REQUESTS = 64
# Smallest share of `receive_seconds` that a request has while many of its client's requests are still to arrive.
MIN_RECEIVE_SHARE = 0.5
# Factor on the shared limits that keeps a share for other clients.
OTHERS_FACTOR = 2
# Smaller requests are cheap to refuse.
LARGE_INVALID_BYTES = 64 * 2**10
# The memory of smaller messages of a stream is not worth counting precisely.
SMALL_MESSAGE_BYTES = 4 * 2**10

T = TypeVar("T")


class Calls:
    """The calls in progress. A call ends when its client has received the whole response."""

    max_slow = MAX_SLOW_REQUESTS

    def __init__(self, limits: CallLimits, rates: Rates | None = None) -> None:
        self._rates = rates = rates or Rates()
        self.idle = asyncio.Event()
        """Set while no call is in progress that a drain waits for."""
        self.idle.set()
        self._cut_off = False
        self._limits = limits
        self._clients: dict[str, Client] = {}
        self._calls: dict[Call, None] = {}
        self._drained = 0
        """Calls that a drain waits for."""
        self._memory = 0
        self._reading = asyncio.Semaphore(rates.concurrent_reads)
        self._invalid = Pace(rates.invalid_bytes_per_second)
        self._slow: dict[Call, asyncio.Timeout] = {}
        """Timeouts of the slow requests, slowest first."""

    @property
    def count(self) -> int:
        """Number of calls in progress that a drain waits for."""
        return self._drained

    def begin(self, context: Any, drains: bool = True) -> Call:
        """Count the call of the running task as in progress. Raises TooManyCallsError, UnavailableError.

        `drains`: whether a drain waits for it.
        """
        if self._cut_off:
            raise UnavailableError("the server is shutting down")
        name = client_of(context)
        client = self._clients.setdefault(name, Client(name))
        try:
            self._admit(client)
            task = asyncio.current_task()
            assert task is not None
            call = Call(client, context, task, drains)
            client.calls += 1
        finally:
            self._forget_if_idle(client)
        self._calls[call] = client.replaceable[call] = None
        self._drained += drains
        if drains:
            self.idle.clear()
        task.add_done_callback(lambda _: self._end(call))  # the context's callbacks would leave a reference cycle
        return call

    def _admit(self, client: Client) -> None:
        """Raise TooManyCallsError if a client may not begin another call, or make room for it."""
        limit, total = self._limits.calls, len(self._calls)
        if client.calls >= self._limits.calls_per_client:
            raise too_many(f"the client has {client.calls} calls in progress (--max-calls-per-client)")
        if total < limit:
            return
        share = fair_share([each.calls + (each is client) for each in self._clients.values()], limit)
        if client.calls >= min(share, OTHERS_FACTOR * limit - total):
            raise too_many(f"the server has {total} calls in progress (--max-calls), {client.calls} of this client")
        largest = max(self._clients.values(), key=lambda each: len(each.replaceable))
        if largest.calls > share and largest.replaceable:
            next(iter(largest.replaceable)).end(too_many("other clients need the place of this call without a request"))

    def _end(self, call: Call) -> None:
        client = call.client
        del self._calls[call]
        self.hold(call, -call.memory)
        client.calls -= 1
        client.replaceable.pop(call, None)
        self._forget_if_idle(client)
        self._drained -= call.drains
        if not self._drained:
            self.idle.set()

    def _forget_if_idle(self, client: Client) -> None:
        if not client.calls:
            del self._clients[client.name]

    def cancel(self) -> None:
        """Cancel all calls, and refuse further ones."""
        self._cut_off = True
        for call in self._calls:
            call.error = UnavailableError("the server is shutting down")
            call.task.cancel()

    # --- Requests

    async def read(self, call: Call, messages: AsyncIterator[bytes], parser: RequestParser[T]) -> T:
        """Read the single request of a call.

        Raises TooManyCallsError, SlowRequestError, InvalidArgumentError, and the errors of the parser.
        """
        payload = await self._payload(call, messages)
        self._arrived(call)
        if payload is None:
            await asyncio.sleep(ENDING_SECONDS)
            raise InvalidArgumentError("request", "the call has no request")
        call.size = len(payload)
        self.hold(call, await self._checked(call.client, call.size, parser.memory_of(payload)))
        return parser.parse(payload)

    async def read_all(self, call: Call, messages: AsyncIterator[bytes], parser: RequestParser[T]) -> AsyncIterator[T]:
        """Read a stream of requests. Each counts until its response is written: a stream has one for every request.

        Raises TooManyCallsError, InvalidArgumentError, and the errors of the parser.
        """
        async for payload in messages:
            self._arrived(call)
            size = len(payload)
            needed = parser.memory_of(payload) if size > SMALL_MESSAGE_BYTES else (1 + MAX_GROWTH) * size
            held = await self._checked(call.client, size, needed)
            self.hold(call, held)
            call.unanswered.append(held)
            request = parser.parse(payload)
            del payload
            yield request
            del request

    def answered_next(self, call: Call) -> None:
        """Stop counting the earliest unanswered request of a stream, whose response has been written."""
        if call.unanswered:
            self.hold(call, -call.unanswered.popleft())

    def _arrived(self, call: Call) -> None:
        """Note that the request of a call has arrived."""
        call.client.replaceable.pop(call, None)

    def hold(self, call: Call, memory: int) -> None:
        call.memory += memory
        call.client.memory += memory
        self._memory += memory

    def answered(self, call: Call, size: int) -> None:
        """Count the memory of an answer, instead of the request's, until it is read."""
        if call in self._calls:
            self.hold(call, size - call.memory)
            call.is_answered = True

    async def delay_refusal(self, call: Call) -> None:
        """Wait before the refusal of an invalid request, the longer the more bytes of them the client has sent."""
        if call.size >= LARGE_INVALID_BYTES:
            await self._invalid.turn(call.client.name, call.size)

    async def _checked(self, client: Client, size: int, needed: int) -> int:
        """Return the memory that a message needs. Raises InvalidArgumentError, TooManyCallsError."""
        limit = self._limits.memory
        if needed > max(limit, (1 + SCALAR_BYTES) * size):
            await self._invalid.turn(client.name, size)
            reason = f"has so many small parts that it needs {needed} bytes, of {limit} (--request-memory)"
            raise InvalidArgumentError("request", reason)
        self._check_memory(client, needed)
        return needed

    def _check_memory(self, client: Client, needed: int) -> None:
        """Raise TooManyCallsError if a client may not hold more memory."""
        limit, total = self._limits.memory, self._memory + needed
        if not self._memory or total < limit:  # a single request is always served
            return
        if total < OTHERS_FACTOR * limit:
            held = [each.memory + (needed if each is client else 0) for each in self._clients.values()]
            if not client.memory or client.memory + needed < fair_share(held, limit):
                return
        used = f"{self._memory} of {limit} bytes"
        raise too_many(f"the requests in progress take {used} (--request-memory)")

    async def _payload(self, call: Call, messages: AsyncIterator[bytes]) -> bytes | None:
        """Return the next message, or None at the end of the stream. Raises TooManyCallsError, SlowRequestError."""
        seconds, slot, slow_timer = self._limits.receive_seconds, ExitStack(), None
        if len(call.client.replaceable) > self.max_slow:  # a crowd ends one by one, not at once
            seconds *= random.uniform(MIN_RECEIVE_SHARE, 1)
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(seconds) as timeout:
                await self._take_slot(call.client, slot)
                timeout.reschedule(loop.time() + seconds)  # the request may have arrived, but not been read
                self._check_memory(call.client, 0)
                slow_timer = loop.call_later(self._rates.read_slot_seconds, self._mark_slow, call, slot, timeout)
                return await anext(messages, None)
        except TimeoutError:
            if slow_timer is None:
                raise too_many(f"no request slot became free within {seconds:g} s (--receive-seconds)") from None
            raise SlowRequestError(f"the request did not arrive within {seconds:g} s (--receive-seconds)") from None
        finally:
            slot.close()
            if slow_timer is not None:
                slow_timer.cancel()
            self._slow.pop(call, None)

    def _mark_slow(self, call: Call, slot: ExitStack, timeout: asyncio.Timeout) -> None:
        slot.close()
        self._slow[call] = timeout
        if len(self._slow) > self.max_slow:
            [(client, _)] = Counter(each.client for each in self._slow).most_common(1)
            slowest = next(each for each in self._slow if each.client is client)
            with suppress(RuntimeError):  # it expires already
                self._slow.pop(slowest).reschedule(asyncio.get_running_loop().time())

    async def _take_slot(self, client: Client, slot: ExitStack) -> None:
        """Acquire a slot to read a request, until the stack is closed."""
        for semaphore in (client.reading, self._reading):
            await semaphore.acquire()
            slot.callback(semaphore.release)
