"""Client connections. When TLS files change, new calls use a new connection; earlier calls finish on the old one."""

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, TypeAlias, TypeVar, Unpack

import grpc

from specpool.client.retries import Retries
from specpool.errors import RequestError
from specpool.rpc.security.channel import COORDINATOR_PORT, Connector, SecurityOptions, check_address
from specpool.v1 import generation_pb2_grpc

C = TypeVar("C")
"""A blocking or an asyncio channel."""
AsyncStub: TypeAlias = "generation_pb2_grpc.GenerationServiceAsyncStub"
SyncStub: TypeAlias = generation_pb2_grpc.GenerationServiceStub


@dataclass(eq=False)
class Connection(Generic[C]):
    """A channel, its stub, and the number of calls in progress."""

    channel: C
    stub: Any
    calls: int = 0


class Connected(Generic[C]):
    """Base class of both clients. Keeps the newest connection, and older ones with unfinished calls. Thread-safe."""

    _open_channel: ClassVar[Callable[[Connector], Any]]

    def __init__(self, address: str, retry_seconds: float = 30.0, **security: Unpack[SecurityOptions]) -> None:
        """`address`: "host:port". `retry_seconds`: how long to retry while the server is unavailable or overloaded; 0:
        never. `security`: TLS and token. ValueError for an address without a port, or an option whose file is unusable.
        """
        self._connector = Connector(check_address(address, COORDINATOR_PORT), **security)
        self._retry_seconds = retry_seconds
        self._lock = threading.Lock()
        self._connections = [self._connect()]
        """New calls use the last one."""

    def _connect(self) -> Connection[C]:
        channel = type(self)._open_channel(self._connector)
        make_stub: Any = generation_pb2_grpc.GenerationServiceStub
        return Connection(channel, make_stub(channel))

    def _begin_call(self) -> Connection[C]:
        """Return the connection for a new call. Pair it with `_end_call`."""
        with self._lock:
            if self._connector.is_outdated:
                self._connections.append(self._connect())
            connection = self._connections[-1]
            connection.calls += 1
            return connection

    def _end_call(self, connection: Connection[C]) -> list[C]:
        """End a call; return the unused channels to close."""
        with self._lock:
            connection.calls -= 1
            unused = [other for other in self._connections[:-1] if not other.calls]
            self._connections = [other for other in self._connections if other not in unused]
            return [other.channel for other in unused]

    def _close(self) -> list[C]:
        """Return the channels to close."""
        return [connection.channel for connection in self._connections]

    def _pause(self, retries: Retries, error: RequestError) -> float:
        """Seconds to wait before the next attempt. Raises the error if it is final."""
        return retries.pause(error)


class AsyncConnected(Connected[grpc.aio.Channel]):
    """Base class of the client for asyncio."""

    _open_channel = Connector.open


class SyncConnected(Connected[grpc.Channel]):
    """Base class of the blocking client."""

    _open_channel = Connector.open_blocking
    _closed = False

    def _close(self) -> list[grpc.Channel]:
        self._closed = True
        return super()._close()

    def _pause(self, retries: Retries, error: RequestError) -> float:
        if self._closed:  # closed by another thread, which cancels the call
            raise error
        return super()._pause(retries, error)
