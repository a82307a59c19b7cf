"""Connections of a client: it opens a new one when TLS files change, while earlier calls end on the old one."""

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from specpool.rpc.security.channel import Connector
from specpool.v1 import generation_pb2_grpc

C = TypeVar("C")


@dataclass(eq=False)
class Connection(Generic[C]):
    """A channel with its stub and number of calls."""

    channel: C
    stub: Any
    calls: int = 0


class Connections(Generic[C]):
    """The connection for new calls, and earlier ones with unfinished calls. Thread-safe."""

    def __init__(self, connector: Connector, open_channel: Callable[[], C]) -> None:
        """`open_channel`: the connector's method that opens blocking or asyncio channels."""
        self._connector, self._open_channel = connector, open_channel
        self._lock = threading.Lock()
        self._open = [self._connect()]
        """The last one is for new calls."""

    def begin(self) -> Connection[C]:
        """The connection for a call. `end` must follow."""
        with self._lock:
            if self._connector.is_outdated:
                self._open.append(self._connect())
            connection = self._open[-1]
            connection.calls += 1
            return connection

    def end(self, connection: Connection[C]) -> list[C]:
        """End a call; return the unused channels to close."""
        with self._lock:
            connection.calls -= 1
            ended = [other for other in self._open[:-1] if not other.calls]
            self._open = [other for other in self._open if other not in ended]
            return [other.channel for other in ended]

    def channels(self) -> list[C]:
        """All open channels."""
        return [connection.channel for connection in self._open]

    def _connect(self) -> Connection[C]:
        channel = self._open_channel()
        make_stub: Any = generation_pb2_grpc.GenerationServiceStub
        return Connection(channel, make_stub(channel))
