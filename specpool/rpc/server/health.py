"""`grpc.health.v1.Health`, and the limits on health checks and reflection. Status changes never wait for a watcher."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import ExitStack
from typing import Any

from grpc_health.v1 import health_pb2 as pb
from grpc_health.v1 import health_pb2_grpc

from specpool.protocol.errors import InvalidArgumentError, NotFoundError
from specpool.rpc.config.settings import ServerSettings
from specpool.rpc.server.calls import Call, CallLimits, Client, too_many
from specpool.rpc.server.limits import Calls
from specpool.rpc.status import STATUS_CODES

MAX_HEALTH_CALLS = 256
"""Maximum number of calls of all clients together."""
HEALTH_RECEIVE_SECONDS = 1.0
MAX_HEALTH_REQUEST_BYTES = 4096
"""A health check request holds only the name of a service."""


class NewestCalls(Calls):
    """Calls in which the newest wins: a new call ends the oldest call of the client with the most."""

    max_slow = 8

    def __init__(self, settings: ServerSettings) -> None:
        calls, memory = MAX_HEALTH_CALLS, settings.request_memory
        super().__init__(CallLimits(calls, calls, memory, HEALTH_RECEIVE_SECONDS))

    def _admit(self, client: Client) -> None:
        clients = [each for each in self._clients.values() if each.replaceable]
        if sum(len(each.replaceable) for each in clients) >= self._limits.calls:
            largest = max(clients, key=lambda each: len(each.replaceable) + (each is client))
            next(iter(largest.replaceable)).end(too_many("newer calls took the place of this one"))

    def _arrived(self, call: Call) -> None:
        """Keep the call replaceable."""

    async def _take_slot(self, client: Client, slot: ExitStack) -> None:
        """Read at once."""

    async def _checked(self, client: Client, size: int, needed: int) -> int:
        if size > MAX_HEALTH_REQUEST_BYTES:
            raise InvalidArgumentError("request", f"{size} bytes exceed {MAX_HEALTH_REQUEST_BYTES}")
        return needed


def process_name(pid: int) -> str:
    """Return the health check name of one process, which no other server on its port knows."""
    return f"process-{pid}"


class HealthServicer(health_pb2_grpc.HealthServicer):  # type: ignore[misc]  # no stubs
    """Serving status of the process and of its services, by name."""

    def __init__(self) -> None:
        self._statuses: dict[str, int] = {}
        self._changed = asyncio.Event()
        """Set on the next change, then replaced."""
        self._ending = False

    def set(self, service: str, serving: bool) -> None:
        status = pb.HealthCheckResponse.SERVING if serving else pb.HealthCheckResponse.NOT_SERVING
        self._statuses[service] = status
        self._wake()

    def end_watches(self) -> None:
        """End every watch after it has sent the last status."""
        self._ending = True
        self._wake()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def Check(self, request: pb.HealthCheckRequest, context: Any) -> pb.HealthCheckResponse:
        status = self._statuses.get(request.service)
        if status is None:
            await context.abort(STATUS_CODES[NotFoundError])
        return pb.HealthCheckResponse(status=status)

    async def Watch(self, request: pb.HealthCheckRequest, context: Any) -> AsyncIterator[pb.HealthCheckResponse]:
        """Send the status of a service now and after each change. Slow clients may miss intermediate changes."""
        sent = None
        while True:
            changed = self._changed
            status = self._statuses.get(request.service, pb.HealthCheckResponse.SERVICE_UNKNOWN)
            if status != sent:
                yield pb.HealthCheckResponse(status=status)
                sent = status
            elif self._ending:
                return
            else:
                await changed.wait()
