"""The RPCs shared by both worker services."""

from dataclasses import replace
from typing import Any

from protocol.codec import read_release, require_coordinator, worker_info_response
from specpool.v1 import common_pb2 as pb
from worker.host import WorkerHost


class WorkerServicer:
    """Base class of both workers' servicers."""

    def __init__(self, host: WorkerHost) -> None:
        self._host = host

    async def Release(self, request: pb.ReleaseRequest, context: Any) -> pb.ReleaseResponse:
        """Frees sequences."""
        require_coordinator(request.coordinator_id)
        ids = read_release(request)
        released = await self._host.run(
            lambda backend: backend.release(request.coordinator_id, ids), request.coordinator_id, "Release"
        )
        return pb.ReleaseResponse(released=released)

    async def GetWorkerInfo(self, request: pb.GetWorkerInfoRequest, context: Any) -> pb.GetWorkerInfoResponse:
        """Describes the worker, at once: also while a long pass runs."""
        return worker_info_response(replace(self._host.info, instance_id=self._host.instance_id))
