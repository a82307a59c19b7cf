"""Targets whose address leads to another process from one call to the next."""

import asyncio
import random
from collections.abc import AsyncIterator, Sequence
from typing import Any

from relay import forward
from serving import RecordingTarget

from specpool.testing import FakeTarget


class OtherTarget(RecordingTarget):
    """Chooses different tokens."""

    def choose(self, context: Sequence[int]) -> int:
        return (super().choose(context) + 1) % 250


class ServiceTarget(RecordingTarget):
    """A target whose address another worker can take over at once, like a service name."""

    async def start(self, address: str = "127.0.0.1:0") -> str:
        self._behind = await super().start()
        self._replaced_by: FakeTarget | None = None
        self._connections: list[asyncio.Future[None]] = []
        self._proxy = await asyncio.start_server(self._connect, "127.0.0.1", 0)
        return f"127.0.0.1:{self._proxy.sockets[0].getsockname()[1]}"

    async def replace(self, other: FakeTarget) -> None:
        """Route new connections to `other` and stop this target."""
        self._replaced_by, self._behind = other, await other.start()
        await super().stop()

    async def stop(self) -> None:
        self._proxy.close()
        await super().stop()
        if self._replaced_by is not None:
            await self._replaced_by.stop()
        await asyncio.gather(*self._connections)  # a socket that is left would fail another test

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = asyncio.ensure_future(forward(reader, writer, self._behind))
        self._connections.append(connection)
        await connection


class Balanced(RecordingTarget):
    """Several targets behind a load balancer that chooses one for each call."""

    def __init__(self, members: Sequence[RecordingTarget], chosen: int | None = None) -> None:
        """`chosen`: the member that all calls go to; None: a random one for each call."""
        super().__init__()
        self.members, self._chosen = members, chosen
        self._random = random.Random(0)
        self._streams: set[Any] = set()

    def switch(self, chosen: int) -> None:
        """Route new calls to another member, and end the streams to the last one."""
        self._chosen = chosen
        for reading in self._streams:
            reading.cancel()

    @property
    def _member(self) -> RecordingTarget:
        return self._random.choice(self.members) if self._chosen is None else self.members[self._chosen]

    async def GetWorkerInfo(self, request: Any, context: Any) -> Any:
        return await self._member.GetWorkerInfo(request, context)

    async def GetTokenizer(self, request: Any, context: Any) -> Any:
        return await self._member.GetTokenizer(request, context)

    async def Release(self, request: Any, context: Any) -> Any:
        return await self._member.Release(request, context)

    async def Verify(self, request: Any, context: Any) -> Any:
        return await self._member.Verify(request, context)

    async def VerifyStream(self, requests: AsyncIterator[Any], context: Any) -> AsyncIterator[Any]:
        member = self._member
        while True:
            reading = asyncio.ensure_future(anext(requests, None))
            self._streams.add(reading)
            await asyncio.wait([reading])
            self._streams.discard(reading)
            if reading.cancelled() or (request := reading.result()) is None:
                return
            yield await member.Verify(request, context)
