"""`grpc.health.v1.Health`. Status changes and drains never wait for a client that watches."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from grpc_health.v1 import health_pb2 as pb
from grpc_health.v1 import health_pb2_grpc

from specpool.protocol.errors import NotFoundError
from specpool.rpc.status import STATUS_CODES


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
        """Return the current status of a service."""
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
