"""`vllm.grpc.engine.VllmEngine`, the service that the gateway smg expects of an engine, served by a coordinator."""

import contextlib
import time
from collections.abc import AsyncIterator
from typing import Any

from smg_grpc_proto import vllm_engine_pb2 as smg
from smg_grpc_proto import vllm_engine_pb2_grpc
from smg_grpc_proto.generated import common_pb2

from coordinator.serving.coordinator import Coordinator
from coordinator.serving.intake import Intake
from coordinator.smg.answers import chunk, complete, end, loads, model_info
from coordinator.smg.requests import generate_request
from coordinator.smg.tokenizer import TokenizerArchive
from specpool.protocol.errors import InvalidArgumentError, NotFoundError, UnimplementedError
from specpool.rpc.server.callers import client_of
from specpool.rpc.server.server import Server
from specpool.rpc.version import package_version

SERVICE = "vllm.grpc.engine.VllmEngine"
MOST_ABORTED = 1024
"""Most requests that one call of `Abort` may end."""


def add_engine_service(coordinator: Coordinator, server: Server, intake: Intake) -> None:
    """Adds the service for the gateway to the server."""
    servicer = EngineServicer(coordinator, server, intake)
    server.add(SERVICE, vllm_engine_pb2_grpc.add_VllmEngineServicer_to_server, servicer)


class EngineServicer(vllm_engine_pb2_grpc.VllmEngineServicer):  # type: ignore[misc]  # no stubs
    """Servicer of `vllm.grpc.engine.VllmEngine`."""

    def __init__(self, coordinator: Coordinator, server: Server, intake: Intake) -> None:
        self._coordinator, self._server, self._intake = coordinator, server, intake
        self._archive: TokenizerArchive | None = None

    async def Generate(self, request: smg.GenerateRequest, context: Any) -> AsyncIterator[smg.GenerateResponse]:
        """Sends each sample as one message, or with `stream` as its pieces when they are committed, and its end."""
        asked = generate_request(request)
        async with self._intake.generation(asked, context, request.stream) as (generation, fail):
            # Until these arrive, the gateway can still answer its client with an error; afterwards only with a stream.
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
                    for each in generation.samples:  # in this order, which the gateway keeps
                        yield await complete(each)

    async def Abort(self, request: smg.AbortRequest, context: Any) -> smg.AbortResponse:
        """Ends requests of the same client, as far as they are in flight."""
        if len(request.request_ids) > MOST_ABORTED:
            raise InvalidArgumentError("request_ids", f"has more than {MOST_ABORTED} entries")
        for request_id in request.request_ids:
            with contextlib.suppress(NotFoundError):  # it has ended meanwhile
                self._intake.abort(request_id, client_of(context))
        return smg.AbortResponse()

    async def HealthCheck(self, request: smg.HealthCheckRequest, context: Any) -> smg.HealthCheckResponse:
        """Whether requests are served: not during a drain, nor while the target worker is away."""
        target = self._coordinator.target
        if self._server.stopping:
            return smg.HealthCheckResponse(healthy=False, message="the server is shutting down")
        if not target.is_ready:
            return smg.HealthCheckResponse(healthy=False, message=f"the target worker is {target.state}")
        return smg.HealthCheckResponse(healthy=True, message="ok")

    async def GetModelInfo(self, request: smg.GetModelInfoRequest, context: Any) -> smg.GetModelInfoResponse:
        """The target and its limits. UnavailableError until the target worker has been reached."""
        return model_info(self._coordinator)

    async def GetServerInfo(self, request: smg.GetServerInfoRequest, context: Any) -> smg.GetServerInfoResponse:
        """What the gateway asks when it registers a server."""
        coordinator = self._coordinator
        model = coordinator.target.info
        return smg.GetServerInfoResponse(
            active_requests=coordinator.pool.running + coordinator.pool.queued,
            uptime_seconds=time.monotonic() - coordinator.started,
            server_type="vllm-grpc",
            data_parallel_size=1,
            max_num_seqs=coordinator.pool.max_num_seqs,
            model_dtype=model.dtype if model is not None else "",
        )

    async def GetLoads(self, request: smg.GetLoadsRequest, context: Any) -> smg.GetLoadsResponse:
        """The load, by which the gateway chooses among several servers."""
        target = self._coordinator.target
        return loads(self._coordinator, await target.load() if target.is_ready else None, package_version())

    async def GetTokenizer(
        self, request: common_pb2.GetTokenizerRequest, context: Any
    ) -> AsyncIterator[common_pb2.GetTokenizerChunk]:
        """The target's tokenizer, as a zip archive. UnavailableError until the target worker has been reached."""
        tokenizer, model = self._coordinator.tokenizer, self._coordinator.target.info
        assert model is not None
        if self._archive is None:  # the tokenizer never changes: a worker with another one is refused
            self._archive = TokenizerArchive(tokenizer.files, model.architecture)
        for piece in await self._archive.chunks():
            yield piece

    async def Embed(self, request: smg.EmbedRequest, context: Any) -> smg.EmbedResponse:
        raise UnimplementedError("Embed: this server generates text, and computes no embeddings")

    async def FlushCache(self, request: Any, context: Any) -> Any:
        raise UnimplementedError("FlushCache: cached prefixes are dropped when their slots are needed")

    async def StartProfile(self, request: Any, context: Any) -> Any:
        raise UnimplementedError("StartProfile: this server has no profiler")

    async def StopProfile(self, request: Any, context: Any) -> Any:
        raise UnimplementedError("StopProfile: this server has no profiler")

    async def SubscribeKvEvents(self, request: Any, context: Any) -> AsyncIterator[common_pb2.KvEventBatch]:
        raise UnimplementedError("SubscribeKvEvents: this server publishes no events of its cache")
        yield  # so that it is a stream
