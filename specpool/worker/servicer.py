"""The RPCs shared by both worker services."""

from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, ClassVar

from specpool.protocol.codec import read_release, require_coordinator, worker_info_response
from specpool.rpc.observability import logs
from specpool.rpc.observability.tracing import Span, Tracer
from specpool.rpc.server.callers import client_of
from specpool.v1 import common_pb2 as pb
from specpool.worker.host import WorkerHost
from specpool.worker.round_merging import Round


class WorkerServicer:
    """Base class of both workers' servicers. A round goes from `round` to the host, and from there to `serve`."""

    method: ClassVar[str]
    """The RPC that serves one round."""
    read: ClassVar[Any]
    """Maps a request and the backend to a round, while the model may run. Reads only constants of the backend. Raises
    InvalidArgumentError."""
    serve: ClassVar[Any]
    """Maps rounds and the backend to the results of each, in item order. Runs on the model thread."""
    work: ClassVar[Any]
    """Maps a round and the backend to the `Work` that it takes. Runs on the model thread."""
    respond: ClassVar[Any]
    """Maps a round id, results, timing fields and the instance id to a response."""

    max_rounds_ahead: ClassVar[int] = 0
    """Rounds that a coordinator may send before it gets an earlier response."""

    def __init__(self, host: WorkerHost, tracer: Tracer | None = None) -> None:
        self._host, self._tracer = host, tracer

    async def round(self, request: Any) -> Any:
        """Serve one round, in a trace span if the coordinator traces it."""
        with self._span(request) as span:
            require_coordinator(request.coordinator_id)
            name = f"{self.method} (round {request.round_id}, {len(request.items)} sequences)"
            backend = self._host.backend
            round_ = self.read(request, backend)
            waiting = Round(request.coordinator_id, round_, lambda: self.work(round_, backend))
            served = await self._host.serve_round(waiting, name, self.serve)
            response = self.respond(request.round_id, *served, self._host.instance_id)
            if span is not None:
                stages = ("forward", "realign", *(["draft"] if getattr(response, "draft_ns", 0) else []))
                span.note({f"specpool.{stage}_s": getattr(response, f"{stage}_ns") / 1e9 for stage in stages})
            return response

    async def rounds(self, requests: AsyncIterator[Any], context: Any) -> AsyncIterator[Any]:
        async for response in self._host.streams.each(requests, self.round, client_of(context)):
            yield response

    @contextmanager
    def _span(self, request: Any) -> Iterator[Span | None]:
        span = None if self._tracer is None else self._tracer.round(self.method.lower(), request.traceparent)
        if span is None:
            yield None
            return
        with span.ending(), logs.bound_trace(span.trace_id):
            span.note({"specpool.round.id": request.round_id, "specpool.group.size": len(request.items)})
            yield span

    async def Release(self, request: pb.ReleaseRequest, context: Any) -> pb.ReleaseResponse:
        require_coordinator(request.coordinator_id)
        ids = read_release(request)
        released = await self._host.run(
            lambda backend: backend.release(request.coordinator_id, ids), request.coordinator_id, "Release"
        )
        return pb.ReleaseResponse(released=released, instance_id=self._host.instance_id)

    async def WatchStartup(
        self, request: pb.WatchStartupRequest, context: Any
    ) -> AsyncIterator[pb.WatchStartupResponse]:
        """Stream the phases of the startup until it ends."""
        async for phase, failure in self._host.startup.watch():
            yield pb.WatchStartupResponse(phase=phase, failure=failure)

    async def GetWorkerInfo(self, request: pb.GetWorkerInfoRequest, context: Any) -> pb.GetWorkerInfoResponse:
        """Describe the worker. Answers at once, even while a long pass runs."""
        info = replace(self._host.info, instance_id=self._host.instance_id, max_rounds_ahead=self.max_rounds_ahead)
        return worker_info_response(info)
