"""Health checks of the processes of `specpool up`, over gRPC and HTTP."""

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Protocol

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from specpool.rpc.security.channel import Connector, SecurityOptions, split_address
from specpool.rpc.security.tls import client_context
from specpool.rpc.server.health import process_name

# A process may answer slowly while it starts.
TIMEOUT_SECONDS = 1.0
CONNECT_SECONDS = 20.0
"""Longer than all liveness checks take: a connection to a stopped process must not fail before they time out."""
OK = 200
_UNREACHABLE = {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED}


class Checks(Protocol):
    """Health checks of one process."""

    async def is_serving(self, pid: int) -> bool:
        """Return whether the process with this id listens and serves."""

    async def answers(self, timeout_seconds: float) -> bool:
        """Return whether a check does not time out, whatever its result, even a refused connection."""


async def is_serving(channel: grpc.aio.Channel, service: str = "") -> bool:
    """Whether the server is reachable and reports SERVING for a health check name; "" stands for all services.

    Raises the AioRpcError of a server without this name, or without health checks.
    """
    request = health_pb2.HealthCheckRequest(service=service)
    try:
        response = await health_pb2_grpc.HealthStub(channel).Check(request, timeout=TIMEOUT_SECONDS)
    except grpc.aio.AioRpcError as error:
        if error.code() in _UNREACHABLE:
            return False
        raise
    return bool(response.status == health_pb2.HealthCheckResponse.SERVING)


@dataclass(frozen=True)
class GrpcChecks:
    channel: grpc.aio.Channel

    async def is_serving(self, pid: int) -> bool:
        # Another server on the port does not know this name. Ours will soon report that the port is in use.
        with contextlib.suppress(grpc.aio.AioRpcError):
            return await is_serving(self.channel, process_name(pid))
        return False

    async def answers(self, timeout_seconds: float) -> bool:
        request = health_pb2.HealthCheckRequest()
        try:
            # does not time out if the process has exited
            await health_pb2_grpc.HealthStub(self.channel).Check(request, timeout=timeout_seconds)
        except grpc.aio.AioRpcError as error:
            return bool(error.code() is not grpc.StatusCode.DEADLINE_EXCEEDED)
        return True


@dataclass(frozen=True)
class GrpcProbe:
    """Checks `grpc.health.v1` at `address`, over one connection."""

    address: str
    security: SecurityOptions = field(default_factory=SecurityOptions)

    @asynccontextmanager
    async def open(self, connect_seconds: float | None = None) -> AsyncIterator[GrpcChecks]:
        async with Connector(self.address, **self.security).open(connect_seconds) as channel:
            yield GrpcChecks(channel)


@dataclass(frozen=True)
class HttpProbe:
    """Checks `GET /health` at `address`, over a new connection each time. With TLS, trusts only `tls_ca`."""

    address: str
    security: SecurityOptions = field(default_factory=SecurityOptions)

    @asynccontextmanager
    async def open(self, connect_seconds: float | None = None) -> AsyncIterator["HttpProbe"]:
        yield self

    async def is_serving(self, pid: int) -> bool:
        with contextlib.suppress(OSError, ValueError, LookupError):  # not listening yet, or not an HTTP server
            async with asyncio.timeout(TIMEOUT_SECONDS):
                return await self._status() == OK
        return False

    async def answers(self, timeout_seconds: float) -> bool:
        with contextlib.suppress(OSError, ValueError, LookupError):
            try:
                async with asyncio.timeout(timeout_seconds):
                    await self._status()
            except TimeoutError:
                return False
        return True

    async def _status(self) -> int:
        """Return the status of a check. Raises OSError, ValueError or LookupError if there is none."""
        target = split_address(self.address)
        assert target is not None
        reader, writer = await asyncio.open_connection(*target, ssl=self._context())
        try:
            writer.write(b"GET /health HTTP/1.0\r\n\r\n")
            return int((await reader.readline()).split()[1])
        finally:
            writer.transport.abort()  # don't wait for a stopped process

    def _context(self) -> ssl.SSLContext | None:
        files = Connector(self.address, **self.security).tls_files
        if files is None:
            return None
        context = client_context(files)
        context.check_hostname = False
        return context
