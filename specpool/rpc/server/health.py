"""`grpc.health.v1.Health`. Neither a change of status nor a drain ever waits for a client that watches."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from grpc_health.v1 import health_pb2 as pb
from grpc_health.v1 import health_pb2_grpc

from specpool.protocol.errors import NotFoundError
from specpool.rpc.errors import STATUS_CODES


class HealthServicer(health_pb2_grpc.HealthServicer):  # type: ignore[misc]  # no stubs
    """Serving status of the process and of its services, by name."""

    def __init__(self) -> None:
        self._statuses: dict[str, int] = {}
        self._changed = asyncio.Event()
        """Set at the next change, and then replaced by another event."""
        self._ending = False

    def set(self, service: str, serving: bool) -> None:
        """Sets the status of a service."""
        status = pb.HealthCheckResponse.SERVING if serving else pb.HealthCheckResponse.NOT_SERVING
        self._statuses[service] = status
        self._wake()

    def end_watches(self) -> None:
        """Ends every watch once it has sent the last status."""
        self._ending = True
        self._wake()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def Check(self, request: pb.HealthCheckRequest, context: Any) -> pb.HealthCheckResponse:
        """The status of a service now."""
        status = self._statuses.get(request.service)
        if status is None:
            await context.abort(STATUS_CODES[NotFoundError])
        return pb.HealthCheckResponse(status=status)

    async def Watch(self, request: pb.HealthCheckRequest, context: Any) -> AsyncIterator[pb.HealthCheckResponse]:
        """The status of a service now and after each change; a slow client may miss some between."""
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
