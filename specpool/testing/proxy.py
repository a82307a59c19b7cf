"""A TCP proxy that does to connections what networks do: cuts, delays, silence and refusals."""

import asyncio
import contextlib
import socket
import struct
from dataclasses import dataclass, field

CHUNK_BYTES = 65_536
# Chunks of a connection that are held back at a time; a sender that is faster than that waits.
MOST_CHUNKS = 256
RESET_ON_CLOSE = struct.pack("ii", 1, 0)


@dataclass(eq=False)
class _Connection:
    """A client's connection, and the connection to the server that belongs to it."""

    client: asyncio.StreamWriter
    server: asyncio.StreamWriter | None = None
    is_swallowed: bool = False
    """Whether it takes bytes and forwards none, for good."""
    pumps: list[asyncio.Task[None]] = field(default_factory=list)

    def reset(self) -> None:
        """Ends both connections at once with RST, so that each side sees a cut."""
        for pump in self.pumps:
            pump.cancel()
        for writer in (self.client, self.server):
            if writer is not None:
                connection: socket.socket = writer.get_extra_info("socket")
                with contextlib.suppress(OSError):  # closed by the other side meanwhile
                    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET_ON_CLOSE)
                writer.transport.abort()


class CuttingProxy:
    """Forwards TCP connections to a server, and breaks them when told to. `start` it, and connect to the address that
    `start` returns instead of the server's."""

    def __init__(self) -> None:
        self.accepted = 0
        """Connections that were accepted, those refused included."""
        self.refused = 0
        """Connections that were refused."""
        self.cuts = 0
        """Number of calls of `cut`."""
        self.connections_cut = 0
        """Connections that these calls ended."""
        self.bytes_forwarded = 0
        """Bytes that reached the other side, in both directions."""
        self.bytes_swallowed = 0
        """Bytes that were taken and not forwarded."""
        self._target = ("", 0)
        self._listening: asyncio.Server | None = None
        self._connections: set[_Connection] = set()
        self._is_black_hole = self._is_refusing = False
        self._delay_seconds = 0.0

    @property
    def connections(self) -> int:
        """Connections that are open now."""
        return len(self._connections)

    async def start(self, target_address: str) -> str:
        """Listens, and returns the address that stands for `target_address` ("host:port") from now on."""
        host, _, port = target_address.rpartition(":")
        self._target = (host.strip("[]"), int(port))
        self._listening = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        return f"127.0.0.1:{self._listening.sockets[0].getsockname()[1]}"

    def cut(self) -> None:
        """Ends all connections at once (RST). New ones are accepted."""
        self.cuts += 1
        self._reset([*self._connections])

    def swallow(self) -> None:
        """Takes all bytes of the connections that are open now and forwards none, without closing them, as a router
        does that has forgotten them. New connections are forwarded."""
        for connection in self._connections:
            connection.is_swallowed = True

    def black_hole(self, is_one: bool) -> None:
        """Swallows all connections, new ones too. When it ends, those that have lost bytes are cut: nothing sensible
        could follow in them."""
        self._is_black_hole = is_one
        if not is_one:
            self._reset([connection for connection in self._connections if connection.is_swallowed])

    def delay(self, seconds: float) -> None:
        """Forwards bytes that come from now on `seconds` later, in their order."""
        self._delay_seconds = seconds

    def refuse(self, is_refusing: bool) -> None:
        """Ends new connections as soon as they come (RST). Those that are open stay."""
        self._is_refusing = is_refusing

    async def stop(self) -> None:
        """Stops listening and ends all connections."""
        if self._listening is not None:
            self._listening.close()
        pumps = [pump for connection in self._connections for pump in connection.pumps]
        self._reset([*self._connections])
        await asyncio.gather(*pumps, return_exceptions=True)
        if self._listening is not None:
            await self._listening.wait_closed()

    def _reset(self, connections: list[_Connection]) -> None:
        self.connections_cut += len(connections)
        for connection in connections:
            self._connections.discard(connection)
            connection.reset()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.accepted += 1
        connection = _Connection(writer)
        if self._is_refusing:
            self.refused += 1
            return connection.reset()
        self._connections.add(connection)
        try:
            server_reader, connection.server = await asyncio.open_connection(*self._target)
        except OSError:  # nobody listens there
            self._connections.discard(connection)
            return connection.reset()
        if connection not in self._connections:  # cut meanwhile
            return connection.reset()
        connection.pumps = [
            asyncio.create_task(self._pump(connection, reader, connection.server)),
            asyncio.create_task(self._pump(connection, server_reader, writer)),
        ]
        await asyncio.wait(connection.pumps)
        self._connections.discard(connection)
        connection.reset()
        return None

    async def _pump(self, connection: _Connection, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Forwards the bytes of one direction, to the end of them or of the connection."""
        due: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(MOST_CHUNKS)
        forwarding = asyncio.create_task(self._forward(connection, due, writer))
        now = asyncio.get_running_loop().time
        try:
            with contextlib.suppress(OSError):
                while data := await reader.read(CHUNK_BYTES):
                    await due.put((now() + self._delay_seconds, data))
            await due.put((now() + self._delay_seconds, b""))
            await forwarding
        finally:
            forwarding.cancel()

    async def _forward(
        self, connection: _Connection, due: asyncio.Queue[tuple[float, bytes]], writer: asyncio.StreamWriter
    ) -> None:
        with contextlib.suppress(OSError):
            while True:
                when, data = await due.get()
                await asyncio.sleep(max(0.0, when - asyncio.get_running_loop().time()))
                connection.is_swallowed |= self._is_black_hole
                if connection.is_swallowed:
                    self.bytes_swallowed += len(data)
                elif data:
                    self.bytes_forwarded += len(data)
                    writer.write(data)
                    await writer.drain()
                else:
                    writer.write_eof()
                if not data:
                    return
