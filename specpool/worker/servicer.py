"""The RPCs shared by both worker services."""

from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

from specpool.protocol.codec import read_release, require_coordinator, worker_info_response
from specpool.rpc.observability import logs
from specpool.rpc.observability.tracing import Tracer
from specpool.v1 import common_pb2 as pb
from specpool.worker.host import WorkerHost


class WorkerServicer:
    """Base class of both workers' servicers."""

    def __init__(self, host: WorkerHost, tracer: Tracer | None = None) -> None:
        self._host, self._tracer = host, tracer

    async def _traced(self, method: str, request: Any, answer: Callable[[Any], Awaitable[Any]]) -> Any:
        """The answer to a round, in a span of its own if the coordinator traces the round."""
        if self._tracer is None or (span := self._tracer.round(method, request.traceparent)) is None:
            return await answer(request)
        with span.ending(), logs.bound_trace(span.trace_id):
            span.note({"specpool.round.id": request.round_id, "specpool.group.size": len(request.items)})
            response = await answer(request)
            span.note(
                {"specpool.forward_s": response.forward_ns / 1e9, "specpool.realign_s": response.realign_ns / 1e9}
            )
            return response

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
