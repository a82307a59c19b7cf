"""An in-memory network: channels, connections and servers with gRPC's semantics, and faults.

Messages are serialized and parsed as on the wire. Those of one call arrive in order; different calls overtake each
other. A cut connection fails its calls, and their handlers are cancelled. A silent one delivers everything once the
silence ends, unless the keepalive gives up first.
"""

import asyncio
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from hashlib import sha256
from typing import Any

import grpc

from simulator.calls import ClientCall, ServerCall, Status, StreamCall, UnaryCall
from simulator.clock import VirtualLoop

MIN_LATENCY, MAX_LATENCY = 0.0001, 0.002
CONNECT_TIMEOUT_SECONDS = 0.2
FIRST_BACKOFF_SECONDS, MAX_BACKOFF_SECONDS = 0.2, 2.0
KEEPALIVE_SECONDS = 30.0
STEP = 1e-6
"""Messages of a call are at least this far apart."""

Handlers = dict[str, Any]
"""RPC method handlers by path."""


@dataclass
class Endpoint:
    """An address: the server that listens there, and the faults of the network around it."""

    handlers: Handlers | None = None
    """None: nothing listens."""
    refuses_until: float = 0.0
    silent_until: float = 0.0
    delay: float = 0.0
    """Extra seconds of the next `delayed` messages."""
    delayed: int = 0
    connections: list["Connection"] = field(default_factory=list)


class Network:
    """All endpoints, by address."""

    def __init__(self, loop: VirtualLoop, rng: random.Random, on_error: Callable[[str, BaseException], None]) -> None:
        """`on_error`: called with the path and the unexpected error of a handler."""
        self.loop, self.rng, self.on_error = loop, rng, on_error
        self.messages = 0
        self.digest = sha256()
        """Of all messages, with their times."""
        self._endpoints: dict[str, Endpoint] = {}

    def __getitem__(self, address: str) -> Endpoint:
        return self._endpoints.setdefault(address, Endpoint())

    def channel(self, address: str, options: Any = None) -> "Channel":
        """Stands in for `grpc.aio.insecure_channel`."""
        return Channel(self, address)

    def cut(self, address: str, lag: float = 0.0) -> bool:
        """Cut all connections to an address. The server notices `lag` seconds later. Return whether there were any."""
        cut = list(self[address].connections)
        for connection in cut:
            connection.cut("connection reset", lag)
        return bool(cut)

    def silence(self, address: str, seconds: float) -> None:
        """Deliver nothing from and to an address for a while."""
        endpoint = self[address]
        endpoint.silent_until = max(endpoint.silent_until, self.loop.time() + seconds)
        for connection in endpoint.connections:
            self.loop.call_later(KEEPALIVE_SECONDS, connection.check_alive)

    def heal(self) -> None:
        """End all faults that last."""
        for endpoint in self._endpoints.values():
            endpoint.refuses_until = endpoint.silent_until = endpoint.delayed = 0

    def latency(self, endpoint: Endpoint) -> float:
        seconds = self.rng.uniform(MIN_LATENCY, MAX_LATENCY)
        if endpoint.delayed:
            endpoint.delayed -= 1
            seconds += endpoint.delay
        return max(seconds, endpoint.silent_until - self.loop.time() + STEP)

    def record(self, path: str, payload: bytes) -> None:
        """Count a message."""
        self.messages += 1
        self.digest.update(f"{self.loop.time():.9f} {path} ".encode() + payload)


class Channel:
    """The part of `grpc.aio.Channel` that stubs and links use."""

    def __init__(self, network: Network, address: str) -> None:
        self.network, self._endpoint = network, network[address]
        self._connection: Connection | None = None
        self._connecting: asyncio.Task[None] | None = None
        self._retry_at = self._backoff = 0.0
        self._is_closed = False

    def unary_unary(self, path: str, request_serializer: Any, response_deserializer: Any, **_: Any) -> Any:
        return partial(self._call, UnaryCall, path, request_serializer, response_deserializer)

    unary_stream = stream_stream = lambda self, path, request_serializer, response_deserializer, **_: partial(
        self._call, StreamCall, path, request_serializer, response_deserializer
    )

    async def close(self, grace: float | None = None) -> None:
        self._is_closed = True
        if grace and self._connection is not None:
            await asyncio.wait([asyncio.ensure_future(call.wait()) for call in self._connection.calls], timeout=grace)
        if self._connecting is not None:
            self._connecting.cancel()
        if self._connection is not None:
            self._connection.cut("channel closed", 0.0, Status(grpc.StatusCode.CANCELLED, "Channel closed."))

    def _call(
        self, kind: type[ClientCall], path: str, serialize: Any, parse: Any, request: Any = None, timeout: Any = None
    ) -> ClientCall:
        call = kind(self, path, serialize, parse)
        if self._is_closed:
            call.finish(Status(grpc.StatusCode.CANCELLED, "Channel closed."))
        else:
            call.begin(request, timeout)
        return call

    async def connected(self) -> "Connection | Status":
        """A connection, or why there is none."""
        loop = self.network.loop
        if self._connection is not None and self._connection.is_open:
            return self._connection
        if loop.time() < self._retry_at:
            return Status(grpc.StatusCode.UNAVAILABLE, "connection refused")
        if self._connecting is None or self._connecting.done():
            self._connecting = loop.create_task(self._connect())
        await asyncio.wait([self._connecting])
        if self._connection is not None and self._connection.is_open:
            return self._connection
        return Status(grpc.StatusCode.UNAVAILABLE, "connection refused")

    async def _connect(self) -> None:
        network, endpoint = self.network, self._endpoint
        latency = 2 * network.latency(endpoint)
        await asyncio.sleep(min(latency, CONNECT_TIMEOUT_SECONDS))
        now = network.loop.time()
        if latency < CONNECT_TIMEOUT_SECONDS and endpoint.handlers is not None and now >= endpoint.refuses_until:
            self._connection = Connection(network, endpoint, endpoint.handlers)
            self._backoff = 0.0
            return
        self._backoff = min(MAX_BACKOFF_SECONDS, max(FIRST_BACKOFF_SECONDS, 1.6 * self._backoff))
        self._retry_at = now + self._backoff


class Connection:
    """A connection from a channel to a server."""

    def __init__(self, network: Network, endpoint: Endpoint, handlers: Handlers) -> None:
        self.network, self._endpoint, self._handlers = network, endpoint, handlers
        self.is_open = True
        self.calls: list[ClientCall] = []
        self.served: dict[ServerCall, None] = {}
        """Calls that the server has not answered, in the order of their start."""
        self._is_served = True
        endpoint.connections.append(self)

    def open(self, call: ClientCall, path: str) -> ServerCall:
        """Begin a call. Its handler starts when the first message arrives."""
        self.calls.append(call)
        served = ServerCall(self, path, self._handlers.get(path), call)
        self.served[served] = None
        return served

    def deliver(self, call: ClientCall | ServerCall, receive: Callable[[], None]) -> None:
        """Call `receive` on the other side of a call, after its earlier messages."""
        loop = self.network.loop
        call.last_arrival = max(call.last_arrival + STEP, loop.time() + self.network.latency(self._endpoint))
        loop.call_at(call.last_arrival, self._receive, receive, isinstance(call, ClientCall))

    def _receive(self, receive: Callable[[], None], by_server: bool) -> None:
        if self._is_served if by_server else self.is_open:
            receive()

    def discard(self, call: ClientCall) -> None:
        """Forget a finished call."""
        if call in self.calls:
            self.calls.remove(call)

    def cut(self, reason: str, lag: float, status: Status | None = None) -> None:
        """Fail all calls. The server notices `lag` seconds later, and serves what arrives until then."""
        self.is_open = False
        if self in self._endpoint.connections:
            self._endpoint.connections.remove(self)
        for call in list(self.calls):
            call.finish(status or Status(grpc.StatusCode.UNAVAILABLE, reason))
        self.network.loop.call_later(lag, self.abandon)

    def abandon(self) -> None:
        """End the server's side."""
        self._is_served = False
        for served in list(self.served):
            served.cancel()

    def check_alive(self) -> None:
        """Cut a connection that is still silent when the keepalive gives up."""
        if self.is_open and self._endpoint.silent_until > self.network.loop.time():
            self.cut("keepalive timeout", 0.0)
