"""Attacks through the edge: without credentials, with raw frames, and floods of resets."""

import asyncio
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from itertools import count, islice

from attacks.attack import attack
from attacks.service import Service

from tests.support.framings import (
    END_HEADERS,
    END_STREAM,
    HEADERS,
    PREFACE,
    RST_STREAM,
    SETTINGS,
    block,
    frame,
    indexed,
)

BEGUN = PREFACE + frame(SETTINGS, 0, 0) + frame(SETTINGS, 1, 0)
PATH = b"/specpool.v1.GenerationService/Generate"
SILENT, CONNECTIONS, CALLS_AT_ONCE = 300, 4, 50
RESETS_PER_SECOND, RESETS_AT_ONCE = 16_000, 400
METADATA_BYTES = 8000
CANCEL = b"\0\0\0\x08"
RETRY_SECONDS, PAUSE_SECONDS = 0.02, 0.005
STRANGER = "127.0.0.2", 0
"""Address of the attacker, other than that of the well-behaved client."""
Fields = dict[bytes, bytes]


async def repeat(address: str, frames: Callable[[], Iterable[bytes]], pause: float = 0.0) -> None:
    """Send frames on a connection, and on a new one whenever it is closed."""
    host, _, port = address.rpartition(":")
    while True:
        with suppress(OSError):
            reader, writer = await asyncio.open_connection(host, int(port), local_addr=STRANGER)
            reading = asyncio.create_task(drain(reader))
            try:
                for part in frames():
                    writer.write(part)
                    await writer.drain()
                    await asyncio.sleep(pause)
                    if reading.done():
                        break
                await reading
            finally:
                reading.cancel()
                writer.close()
        await asyncio.sleep(RETRY_SECONDS)


async def drain(reader: asyncio.StreamReader) -> None:
    while await reader.read(2**16):
        pass


def calls(at_once: int, fields: Fields, is_reset: bool = False) -> Iterator[bytes]:
    """Yield frames without end: in each part, this many calls without a message."""
    yield BEGUN
    every = {b":path": PATH, **fields}
    headers, later = block(every, indexed=True), indexed(every)
    numbers = count(1, 2)
    while True:
        part = b""
        for number in islice(numbers, at_once):
            part += frame(HEADERS, END_HEADERS if is_reset else END_HEADERS | END_STREAM, number, headers)
            part += frame(RST_STREAM, 0, number, CANCEL) if is_reset else b""
            headers = later
        yield part


@attack("300 silent connections", flags=("--max-connections", "256"), edge=True)
async def silent_connections(service: Service) -> None:
    await asyncio.gather(*(repeat(service.coordinator, lambda: [b""]) for _ in range(SILENT)))


@attack("unauthenticated garbage that fills the log", edge=True)
async def garbage(service: Service) -> None:
    """Fields that are no text, and fields of gRPC with values that it cannot read."""
    noise = {b"x-%d" % number: b"garbage \xff" for number in range(20)}
    wrong = {b"grpc-timeout": b"garbage", b"grpc-previous-rpc-attempts": b"garbage", b"grpc-encoding": b"garbage"}
    parts = (lambda: calls(CALLS_AT_ONCE, noise), lambda: calls(CALLS_AT_ONCE, wrong))
    await asyncio.gather(*(repeat(service.coordinator, each, PAUSE_SECONDS) for each in parts * CONNECTIONS))


@attack("paths that are not UTF-8", edge=True)
async def wrong_paths(service: Service) -> None:
    path = frame(HEADERS, END_HEADERS | END_STREAM, 1, block({b":path": b"/\xff"}))
    await repeat(service.coordinator, lambda: [BEGUN + path])


@attack("8 KB of metadata a call without a token", edge=True)
async def large_metadata(service: Service) -> None:
    large = {b"x-%d" % number: b"x" * (METADATA_BYTES // 8) for number in range(8)}

    def parts() -> Iterator[bytes]:
        yield BEGUN
        for number in count(1, 2):
            yield frame(HEADERS, END_HEADERS | END_STREAM, number, block({b":path": PATH, **large}))

    await asyncio.gather(*(repeat(service.coordinator, parts) for _ in range(CONNECTIONS)))


@attack("16,000 resets a second", edge=True)
async def resets(service: Service) -> None:
    """Half of them with a token, as fast as the server reads them and no faster than this."""
    token = {name.encode(): value.encode() for name, value in service.metadata("attacker")}
    pause = 2 * RESETS_AT_ONCE / RESETS_PER_SECOND
    parts = (lambda: calls(RESETS_AT_ONCE, {}, is_reset=True), lambda: calls(RESETS_AT_ONCE, token, is_reset=True))
    await asyncio.gather(*(repeat(service.coordinator, each, pause) for each in parts))
