"""The coordinators behind this server: which of them serve, and which one a request goes to."""

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from hashlib import sha256
from typing import TypeAlias

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from specpool.client.connections import AsyncConnected, AsyncStub, Connection
from specpool.client.failures import async_failure
from specpool.rpc.discovery import Discovery, Endpoint
from specpool.rpc.security.channel import SecurityOptions
from specpool.v1 import generation_pb2 as pb

log = logging.getLogger(__name__)

RETRY_SECONDS = 0.5
"""Pause before an unreachable coordinator is watched again."""
INFO_SECONDS = 5.0
"""Time for which a coordinator's model info is reused."""
CALL_SECONDS = 10.0
"""Time for a call that generates nothing."""
LOAD_FACTOR = 1.25
"""A coordinator takes at most this multiple of its even share of the requests before others take its prefixes."""

Metadata: TypeAlias = Sequence[tuple[str, str]]


class Link(AsyncConnected):
    """The connection to one coordinator."""

    def __init__(self, endpoint: Endpoint, security: SecurityOptions) -> None:
        super().__init__(endpoint.address, 0, **endpoint.secured(security))
        self.address = endpoint.address
        self.is_serving = False
        self.in_flight = 0
        """Requests of this server at the coordinator."""
        self._info: pb.GetModelInfoResponse | None = None
        self._info_until = 0.0
        self._fault: str | None = None
        """What gRPC said when the coordinator was last unreachable."""
        self._watching = asyncio.create_task(self._watch())

    @asynccontextmanager
    async def stub(self) -> AsyncIterator[AsyncStub]:
        """Context manager of one call."""
        async with self._connection() as connection:
            yield connection.stub

    @contextmanager
    def loaded(self) -> Iterator[None]:
        """Context manager of a request, which counts as load."""
        self.in_flight += 1
        try:
            yield
        finally:
            self.in_flight -= 1

    async def info(self, metadata: Metadata, is_cached: bool = True) -> pb.GetModelInfoResponse:
        """Return the model and its formats. Without `is_cached`, the coordinator authenticates the caller."""
        if not is_cached or self._info is None or time.monotonic() > self._info_until:
            async with self.stub() as stub:
                call = stub.GetModelInfo(pb.GetModelInfoRequest(), metadata=metadata, timeout=CALL_SECONDS)
                self._info = await call
            self._info_until = time.monotonic() + INFO_SECONDS
        return self._info

    def score(self, key: bytes) -> bytes:
        """Return the rank of this coordinator for a prefix (rendezvous hashing)."""
        return sha256(self.address.encode() + key).digest()

    async def close(self) -> None:
        """Stop watching, and close the channels."""
        self._watching.cancel()
        await asyncio.gather(self._watching, return_exceptions=True)
        for channel in self._close():
            await channel.close()

    @asynccontextmanager
    async def _connection(self) -> AsyncIterator[Connection[grpc.aio.Channel]]:
        connection = self._begin_call()
        try:
            yield connection
        finally:
            for channel in self._end_call(connection):
                await channel.close()

    async def _watch(self) -> None:
        """Follow the health of the coordinator."""
        while True:
            try:
                async with self._connection() as connection:
                    stub = health_pb2_grpc.HealthStub(connection.channel)
                    async for response in stub.Watch(health_pb2.HealthCheckRequest()):
                        self._set_serving(response.status == health_pb2.HealthCheckResponse.SERVING)
            except grpc.RpcError as error:
                if error.details() != self._fault:
                    reason = await async_failure(error, self._connector)  # connects to find it
                    log.warning("coordinator %s is unreachable: %s", self.address, reason)
                self._fault = error.details()
            self.is_serving = False
            await asyncio.sleep(RETRY_SECONDS)

    def _set_serving(self, is_serving: bool) -> None:
        if is_serving != self.is_serving:
            log.info("coordinator %s %s", self.address, "serves" if is_serving else "does not serve")
        self.is_serving, self._fault = is_serving, None


class Coordinators:
    """All coordinators. Follows DNS names."""

    def __init__(self, addresses: Sequence[str], security: SecurityOptions) -> None:
        """Needs a running event loop."""
        self._security = security
        self._discovery = Discovery(addresses)
        self._links = {endpoint.address: Link(endpoint, security) for endpoint in self._discovery.fixed}
        self._closing: set[asyncio.Task[None]] = set()
        self._following = asyncio.create_task(self._follow())

    @property
    def is_serving(self) -> bool:
        """Whether a coordinator serves."""
        return any(link.is_serving for link in self._links.values())

    def ranked(self, prefix: bytes) -> list[Link]:
        """Return the coordinators to try for a prompt, in order.

        Equal prefixes prefer the same coordinator, whose cache holds them, unless it has more than its share of the
        requests (consistent hashing with bounded loads: Mirrokni et al. 2018). If none serves, all are tried.
        """
        links = list(self._links.values())
        links = [link for link in links if link.is_serving] or links
        share = math.ceil(LOAD_FACTOR * (1 + sum(link.in_flight for link in links)) / max(1, len(links)))
        preferred = sorted(links, key=lambda link: link.score(prefix))
        return sorted(preferred, key=lambda link: max(0, link.in_flight + 1 - share))

    async def close(self) -> None:
        self._following.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._following
        await asyncio.gather(*self._closing, *(link.close() for link in self._links.values()))

    async def _follow(self) -> None:
        async for endpoints in self._discovery.endpoints():
            known = {endpoint.address: endpoint for endpoint in endpoints}
            for address in self._links.keys() - known.keys():
                closing = asyncio.create_task(_retire(self._links.pop(address)))
                self._closing.add(closing)
                closing.add_done_callback(self._closing.discard)
            for address in known.keys() - self._links.keys():
                self._links[address] = Link(known[address], self._security)


async def _retire(link: Link) -> None:
    """Close a connection once its requests have ended."""
    while link.in_flight:  # noqa: ASYNC110 - rare, and nobody waits for it
        await asyncio.sleep(1.0)
    await link.close()
