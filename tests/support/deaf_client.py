"""A raw HTTP/2 client that never reads the bodies of its responses."""

import asyncio
import struct
from collections import defaultdict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from framings import (
    DATA,
    END_HEADERS,
    END_STREAM,
    HEADERS,
    PREFACE,
    SETTINGS,
    WINDOW_UPDATE,
    frame,
    headers,
)

ACKNOWLEDGED, INITIAL_WINDOW_SIZE = 1, 4


class DeafClient:
    """Grants no flow-control window by default, so that the server can send headers and statuses only."""

    def __init__(self, writer: asyncio.StreamWriter) -> None:
        self._writer = writer
        self._streams = 0
        self.frames: dict[int, list[int]] = defaultdict(list)
        """Types of the frames received, by stream."""

    async def call(self, path: str, payload: bytes | None = b"", **metadata: str) -> int:
        """Begin a call, without a request if `payload` is None. Return its stream."""
        stream, self._streams = 2 * self._streams + 1, self._streams + 1
        self._writer.write(frame(HEADERS, END_HEADERS, stream, headers(path, **metadata)))
        if payload is not None:
            self._writer.write(frame(DATA, END_STREAM, stream, struct.pack(">BI", 0, len(payload)) + payload))
        await self._writer.drain()
        return stream

    def grant(self, stream: int, size: int) -> None:
        """Take more bytes of a response."""
        for number in (0, stream):
            self._writer.write(frame(WINDOW_UPDATE, 0, number, struct.pack(">I", size)))

    def has_ended(self, stream: int) -> bool:
        """Whether the response, with its status, has arrived."""
        return self.frames[stream].count(HEADERS) == 2

    async def receive(self, reader: asyncio.StreamReader) -> None:
        while True:
            head = await reader.readexactly(9)
            await reader.readexactly(int.from_bytes(head[:3], "big"))
            self.frames[int.from_bytes(head[5:], "big")].append(head[3])


@asynccontextmanager
async def deaf_client(address: str, window: int = 0) -> AsyncIterator[DeafClient]:
    """Connect; `window`: bytes of each response that the client takes."""
    host, _, port = address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(PREFACE + frame(SETTINGS, 0, 0, struct.pack(">HI", INITIAL_WINDOW_SIZE, window)))
    writer.write(frame(SETTINGS, ACKNOWLEDGED, 0))
    client = DeafClient(writer)
    receiving = asyncio.create_task(client.receive(reader))
    try:
        yield client
    finally:
        receiving.cancel()
        writer.close()
