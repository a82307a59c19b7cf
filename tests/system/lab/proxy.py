"""A TCP proxy that breaks connections as networks do: cuts, delays, silence and refusals."""

import asyncio
import contextlib
import socket
import struct
from dataclasses import dataclass, field

CHUNK_BYTES = 65_536
MAX_CHUNKS = 256
"""Chunks held back per direction; a faster sender waits."""
RESET_ON_CLOSE = struct.pack("ii", 1, 0)


@dataclass(eq=False)
class _Connection:
    """A client's connection and its counterpart to the server."""

    client: asyncio.StreamWriter
    server: asyncio.StreamWriter | None = None
    is_swallowed: bool = False
    """Whether the proxy drops all further bytes."""
    pumps: list[asyncio.Task[None]] = field(default_factory=list)

    def reset(self) -> None:
        """End both connections with RST."""
        for pump in self.pumps:
            pump.cancel()
        for writer in (self.client, self.server):
            if writer is not None:
                connection: socket.socket = writer.get_extra_info("socket")
                with contextlib.suppress(OSError):  # the other side has closed it
                    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET_ON_CLOSE)
                writer.transport.abort()


class CuttingProxy:
    """Forwards TCP connections to a server and breaks them on demand."""

    def __init__(self) -> None:
        self.accepted = self.refused = 0
        """Connections accepted, including refused ones; and connections refused."""
        self.cuts = self.connections_cut = 0
        """Calls of `cut`, and connections that they ended."""
        self.bytes_forwarded = self.bytes_swallowed = 0
        """In both directions."""
        self._target = ("", 0)
        self._listening: asyncio.Server | None = None
        self._connections: set[_Connection] = set()
        self._is_black_hole = self._is_refusing = False
        self._delay_seconds = 0.0

    @property
    def connections(self) -> int:
        """Open connections."""
        return len(self._connections)

    async def start(self, target_address: str) -> str:
        """Start listening. Return the address that stands for `target_address` ("host:port")."""
        host, _, port = target_address.rpartition(":")
        self._target = (host.strip("[]"), int(port))
        self._listening = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        return f"127.0.0.1:{self._listening.sockets[0].getsockname()[1]}"

    def cut(self) -> None:
        """End all open connections with RST."""
        self.cuts += 1
        self._reset([*self._connections])

    def swallow(self) -> None:
        """Drop all further bytes of open connections without closing them, like a router that forgot them."""
        for connection in self._connections:
            connection.is_swallowed = True

    def black_hole(self, is_black_hole: bool) -> None:
        """Drop the bytes of all connections, new ones included. At its end, connections that lost bytes are cut."""
        self._is_black_hole = is_black_hole
        if not is_black_hole:
            self._reset([connection for connection in self._connections if connection.is_swallowed])

    def delay(self, seconds: float) -> None:
        """Delay all further bytes."""
        self._delay_seconds = seconds

    def refuse(self, is_refusing: bool) -> None:
        """Reset new connections; open ones stay."""
        self._is_refusing = is_refusing

    async def stop(self) -> None:
        """Stop listening and end all connections."""
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
        return connection.reset()

    async def _pump(self, connection: _Connection, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Forward one direction until either side ends."""
        due: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(MAX_CHUNKS)
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
