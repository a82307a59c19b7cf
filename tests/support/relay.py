"""Forwards TCP connections."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing, suppress


@asynccontextmanager
async def relay(address: str, delay_seconds: float) -> AsyncIterator[str]:
    """Forward connections to `address` ("host:port"), and delay each chunk. Yield the address of the relay.

    The context ends once all connections are closed.
    """
    tasks: set[asyncio.Task[None]] = set()

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        tasks.add(asyncio.create_task(forward(reader, writer, address, delay_seconds)))

    server = await asyncio.start_server(accept, "127.0.0.1", 0)
    async with server:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    await asyncio.gather(*tasks)


async def forward(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, address: str, delay_seconds: float = 0.0
) -> None:
    """Forward an accepted connection to `address` until both ends close it."""
    host, _, port = address.rpartition(":")
    with closing(writer), suppress(OSError):
        other_reader, other_writer = await asyncio.open_connection(host, int(port))
        with closing(other_writer):
            await asyncio.gather(_copy(reader, other_writer, delay_seconds), _copy(other_reader, writer, delay_seconds))


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, delay_seconds: float) -> None:
    with closing(writer), suppress(OSError):
        while data := await reader.read(2**16):
            await asyncio.sleep(delay_seconds)
            writer.write(data)
            await writer.drain()
    with suppress(OSError):
        await writer.wait_closed()
