"""`vllm.grpc.engine.VllmEngine`, the service that the smg gateway expects of an engine."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from typing import Any

from smg_grpc_proto import vllm_engine_pb2 as smg
from smg_grpc_proto import vllm_engine_pb2_grpc
from smg_grpc_proto.generated import common_pb2

from coordinator.serving.coordinator import Coordinator
from coordinator.serving.intake import Intake
from coordinator.smg.requests import generate_request
from coordinator.smg.responses import chunk, complete, end, loads, model_info
from coordinator.smg.tokenizer import TokenizerArchive
from coordinator.workers.recent import Recent
from specpool.environment.version import package_version
from specpool.protocol.errors import InvalidArgumentError, NotFoundError, UnimplementedError
from specpool.rpc.server.callers import client_of
from specpool.rpc.server.server import Server

SERVICE = "vllm.grpc.engine.VllmEngine"
MAX_ABORTED = 1024
"""Maximum number of request ids in one `Abort` call."""


def add_engine_service(coordinator: Coordinator, server: Server, intake: Intake) -> None:
    """Add the gateway's service to the server."""
    servicer = EngineServicer(coordinator, server, intake)
    server.add(SERVICE, vllm_engine_pb2_grpc.add_VllmEngineServicer_to_server, servicer)


class EngineServicer(vllm_engine_pb2_grpc.VllmEngineServicer):  # type: ignore[misc]  # no stubs
    """Servicer of `vllm.grpc.engine.VllmEngine`."""

    def __init__(self, coordinator: Coordinator, server: Server, intake: Intake) -> None:
        self._coordinator, self._server, self._intake = coordinator, server, intake
        self._archive: TokenizerArchive | None = None
        self._recent_loads = Recent(self._loads)

    async def Generate(self, request: smg.GenerateRequest, context: Any) -> AsyncIterator[smg.GenerateResponse]:
        """Send each sample as one message, or with `stream` as its pieces and its end."""
        converted = generate_request(request)
        async with self._intake.generation(converted, context, request.stream) as (generation, fail):
            # Until these arrive, the gateway can still answer its client with an HTTP error.
            await context.send_initial_metadata(())
            unfinished = len(generation.samples)
            async for sample, commit in generation.stream(fail):
                unfinished -= commit is None
                if request.stream:
                    if commit is None:
                        yield end(sample)
                    elif commit.token_ids:
                        yield chunk(sample, commit)
                elif not unfinished:
                    for finished in generation.samples:  # the gateway keeps this order
                        yield await complete(finished)

    async def Abort(self, request: smg.AbortRequest, context: Any) -> smg.AbortResponse:
        """End requests of the same client. Ids that are not in flight are ignored."""
        if len(request.request_ids) > MAX_ABORTED:
            raise InvalidArgumentError("request_ids", f"has more than {MAX_ABORTED} entries", limit=MAX_ABORTED)
        for request_id in request.request_ids:
            with contextlib.suppress(NotFoundError):  # already ended
                self._intake.abort(request_id, client_of(context))
        return smg.AbortResponse()

    async def HealthCheck(self, request: smg.HealthCheckRequest, context: Any) -> smg.HealthCheckResponse:
        """Return whether requests are served: not during a drain, nor while the target worker is unavailable."""
        if self._server.stopping:
            return smg.HealthCheckResponse(healthy=False, message="the server is shutting down")
        if not self._coordinator.lanes.is_ready:
            states = " and ".join(lane.link.state for lane in self._coordinator.lanes) or "unknown"
            return smg.HealthCheckResponse(healthy=False, message=f"the target worker is {states}")
        return smg.HealthCheckResponse(healthy=True, message="ok")

    async def GetModelInfo(self, request: smg.GetModelInfoRequest, context: Any) -> smg.GetModelInfoResponse:
        """Describe the target and its limits. Raises UnavailableError until the target worker was ready."""
        return model_info(self._coordinator)

    async def GetServerInfo(self, request: smg.GetServerInfoRequest, context: Any) -> smg.GetServerInfoResponse:
        """Describe the server. The gateway calls this when it registers a server."""
        coordinator = self._coordinator
        model = coordinator.model
        return smg.GetServerInfoResponse(
            active_requests=coordinator.lanes.running + coordinator.queue.queued,
            uptime_seconds=time.monotonic() - coordinator.started,
            server_type="vllm-grpc",
            data_parallel_size=1,
            max_num_seqs=coordinator.lanes.max_num_seqs,
            model_dtype=model.dtype if model is not None else "",
        )

    async def GetLoads(self, request: smg.GetLoadsRequest, context: Any) -> smg.GetLoadsResponse:
        """Return a recent load, which the gateway uses to balance servers."""
        return await self._recent_loads.get()

    async def _loads(self) -> smg.GetLoadsResponse:
        targets = [lane.link for lane in self._coordinator.lanes if lane.is_ready]
        answers = await asyncio.gather(*(target.load() for target in targets))
        return loads(self._coordinator, [load for load in answers if load is not None], package_version())

    async def GetTokenizer(
        self, request: common_pb2.GetTokenizerRequest, context: Any
    ) -> AsyncIterator[common_pb2.GetTokenizerChunk]:
        """Send the target's tokenizer as a zip archive. Raises UnavailableError until the target worker was ready."""
        tokenizer, model = self._coordinator.tokenizer, self._coordinator.model
        assert model is not None
        if self._archive is None:  # never changes: workers with another tokenizer are refused
            self._archive = TokenizerArchive(tokenizer.files, model.architecture)
        for piece in await self._archive.chunks():
            yield piece

    async def Embed(self, request: smg.EmbedRequest, context: Any) -> smg.EmbedResponse:
        raise UnimplementedError("Embed: this server generates text and does not compute embeddings")

    async def FlushCache(self, request: Any, context: Any) -> Any:
        raise UnimplementedError("FlushCache: cached prefixes are evicted automatically")

    async def StartProfile(self, request: Any, context: Any) -> Any:
        raise UnimplementedError("StartProfile: this server has no profiler")

    async def StopProfile(self, request: Any, context: Any) -> Any:
        raise UnimplementedError("StopProfile: this server has no profiler")

    async def SubscribeKvEvents(self, request: Any, context: Any) -> AsyncIterator[common_pb2.KvEventBatch]:
        raise UnimplementedError("SubscribeKvEvents: this server does not publish cache events")
        yield  # makes this an async generator
