"""`vllm.grpc.engine.VllmEngine`, the service that the smg gateway expects of an engine."""

import asyncio
import contextlib
import hashlib
import io
import json
import time
import zipfile
from collections.abc import AsyncIterator, Iterator
from functools import cached_property
from typing import Any

from smg_grpc_proto import vllm_engine_pb2 as smg
from smg_grpc_proto import vllm_engine_pb2_grpc
from smg_grpc_proto.generated import common_pb2

from coordinator.serving.coordinator import Coordinator
from coordinator.serving.intake import Intake
from coordinator.smg.cache_batches import batches
from coordinator.smg.messages import chunk, complete, end, generate_request, loads, model_info
from coordinator.workers.states import Recent
from specpool.environment.process import package_version
from specpool.protocol.errors import InvalidArgumentError, NotFoundError, UnimplementedError
from specpool.protocol.tokenizer import TokenizerFiles
from specpool.rpc.server.callers import client_of
from specpool.rpc.server.server import Server

CHUNK_BYTES = 2**20

SERVICE = "vllm.grpc.engine.VllmEngine"
NO_SALT = ""
"""Salt of the gateway's requests, which have no field for one."""
MAX_ABORTED = 1024
"""Maximum number of request ids in one `Abort` call."""


class TokenizerArchive:
    """A zip archive of tokenizer files, built on first use."""

    def __init__(self, files: TokenizerFiles, model_type: str) -> None:
        """`model_type`: name of the architecture in `transformers`."""
        self._files, self._model_type = files, model_type
        self._building = asyncio.Lock()

    async def chunks(self) -> Iterator[common_pb2.GetTokenizerChunk]:
        """Return the archive in chunks. The last one carries its SHA-256."""
        async with self._building:  # once for all callers, in a thread: large vocabularies take a while
            data, fingerprint = await asyncio.to_thread(lambda: self._archive)
        starts = range(0, len(data), CHUNK_BYTES)
        return (
            common_pb2.GetTokenizerChunk(
                data=data[start : start + CHUNK_BYTES], sha256=fingerprint if start == starts[-1] else ""
            )
            for start in starts
        )

    @cached_property
    def _archive(self) -> tuple[bytes, str]:
        """The archive and its SHA-256. Both are deterministic."""
        buffer = io.BytesIO()
        with zipfile.ZipFile(buffer, "w") as archive:
            for name, content in self._contents().items():
                archive.writestr(zipfile.ZipInfo(name), content, zipfile.ZIP_DEFLATED)
        data = buffer.getvalue()
        return data, hashlib.sha256(data).hexdigest()

    def _contents(self) -> dict[str, bytes]:
        """Return the files by name. The two config files hold only the fields that tokenizers need."""
        files = self._files
        config = {"model_type": self._model_type, "eos_token_id": files.eos_token_ids}
        contents = {
            "tokenizer.json": files.tokenizer_json,
            "tokenizer_config.json": json.dumps(files.special_tokens).encode(),
            "config.json": json.dumps(config).encode(),
        }
        if files.chat_template:
            contents["chat_template.jinja"] = files.chat_template.encode()
        return contents


def add_engine_service(coordinator: Coordinator, server: Server, intake: Intake) -> None:
    servicer = EngineServicer(coordinator, server, intake)
    server.add(SERVICE, vllm_engine_pb2_grpc.add_VllmEngineServicer_to_server, servicer)


class EngineServicer(vllm_engine_pb2_grpc.VllmEngineServicer):  # type: ignore[misc]  # no stubs
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
        return loads(self._coordinator, [answer.load for answer in answers if answer is not None], package_version())

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

    async def SubscribeKvEvents(
        self, request: common_pb2.SubscribeKvEventsRequest, context: Any
    ) -> AsyncIterator[common_pb2.KvEventBatch]:
        """Stream the cached pages of the caller's requests, then changes, until the server drains.

        Every stream begins with all pages, whatever sequence number the gateway asks for. A caller that reads too
        slowly gets all pages again. Raises UnimplementedError if prefix caching is disabled.
        """
        events = self._coordinator.cache_events
        if events is None:
            raise UnimplementedError("SubscribeKvEvents: prefix caching is disabled")
        changed, number = asyncio.Event(), 1
        stopping = asyncio.create_task(self._server.wait_stopping())
        stopping.add_done_callback(lambda _: changed.set())
        try:
            with events.subscribe((client_of(context), NO_SALT), changed.set) as subscription:
                while not self._server.stopping:
                    changed.clear()
                    for batch in batches(*subscription.read(), number):
                        yield batch
                        number += 1
                    await changed.wait()
        finally:
            stopping.cancel()
