"""The public gRPC service. Converts protobuf messages to and from the coordinator's objects."""

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any

from coordinator.requests.generation import Sample
from coordinator.scheduling.commits import Commit
from coordinator.serving.coordinator import Coordinator
from coordinator.serving.intake import Intake
from coordinator.workers.link import WorkerLink
from coordinator.workers.recent import Recent
from coordinator.workers.states import LinkState
from specpool.environment.version import package_version
from specpool.protocol.codec import logprobs_message, model_message
from specpool.protocol.worker_info import WorkerInfo
from specpool.rpc.server.callers import client_of
from specpool.rpc.server.server import Server
from specpool.v1 import common_pb2, generation_pb2_grpc
from specpool.v1 import generation_pb2 as pb


class GenerationServicer(generation_pb2_grpc.GenerationServiceServicer):
    """`specpool.v1.GenerationService`."""

    def __init__(self, coordinator: Coordinator, server: Server, intake: Intake) -> None:
        self._coordinator, self._server, self._intake = coordinator, server, intake
        self._info = Recent(self._server_info)

    async def Generate(self, request: pb.GenerateRequest, context: Any) -> pb.GenerateResponse:
        async with self._intake.generation(request, context) as (generation, _):
            first, *others = [await _response(sample) for sample in await generation.finished()]
            first.other_samples.extend(others)
            return first

    async def GenerateStream(
        self, request: pb.GenerateRequest, context: Any
    ) -> AsyncIterator[pb.GenerateStreamResponse]:
        """Stream tokens as they are committed, at the pace of the client."""
        async with self._intake.generation(request, context, stream=True) as (generation, fail):
            request_id = generation.request_id
            async for sample, commit in generation.stream(fail):
                if commit is None:
                    yield pb.GenerateStreamResponse(request_id=request_id, complete=await _response(sample))
                elif commit.token_ids or commit.text:
                    yield pb.GenerateStreamResponse(request_id=request_id, chunk=_chunk(sample, commit))

    async def Abort(self, request: pb.AbortRequest, context: Any) -> pb.AbortResponse:
        """End a request in flight of the same client."""
        self._intake.abort(request.request_id, client_of(context))
        return pb.AbortResponse()

    async def GetModelInfo(self, request: pb.GetModelInfoRequest, context: Any) -> pb.GetModelInfoResponse:
        coordinator, settings = self._coordinator, self._coordinator.settings
        max_model_len = coordinator.max_model_len
        draft = coordinator.draft.first if coordinator.draft is not None else None
        return pb.GetModelInfoResponse(
            max_model_len=max_model_len,
            target=_model(coordinator.model),
            draft=_model(draft.info) if draft is not None else None,
            default_max_tokens=settings.default_max_tokens,
            num_speculative_tokens=settings.num_speculative_tokens,
            max_num_speculative_tokens=settings.max_num_speculative_tokens,
            has_chat_template=coordinator.tokenizer.has_chat_template,
            eos_token_ids=coordinator.tokenizer.eos_token_ids,
            served_model_name=coordinator.served_model_name,
        )

    async def GetServerInfo(self, request: pb.GetServerInfoRequest, context: Any) -> pb.GetServerInfoResponse:
        """Return a state of at most `RECENT_SECONDS` ago, so that frequent polls cost little."""
        return await self._info.get()

    async def _server_info(self) -> pb.GetServerInfoResponse:
        coordinator, counters = self._coordinator, self._coordinator.counters
        lanes = list(coordinator.lanes)
        targets = await asyncio.gather(*(_worker_state(lane.targets.active) for lane in lanes))
        standby, drafts = None, list[pb.WorkerState]()
        if lanes:
            first = coordinator.lanes.first
            links = first.draft.links if first.draft is not None else []
            standby = await _optional_state(first.targets.standby)
            drafts = await asyncio.gather(*map(_worker_state, links))
        return pb.GetServerInfoResponse(
            version=package_version(),
            uptime_s=time.monotonic() - coordinator.started,
            policy=coordinator.settings.policy,
            max_num_seqs=coordinator.lanes.max_num_seqs,
            queue_size=coordinator.settings.queue_size,
            running=coordinator.lanes.running,
            queued=coordinator.queue.queued,
            target=targets[lanes.index(first)] if lanes else None,
            targets=targets,
            draft=min(drafts, key=lambda worker: worker.state != LinkState.READY, default=None),
            draft_workers=drafts,
            standby=standby,
            counters=pb.ServerCounters(
                requests=coordinator.in_flight.requests,
                finished=coordinator.in_flight.finished,
                audited=coordinator.auditor.results,
                rounds=counters.rounds,
                completion_tokens=counters.completion_tokens,
                draft_tokens=counters.draft_tokens,
                accepted_draft_tokens=counters.accepted_draft_tokens,
                cache_misses=counters.cache_misses,
                prompt_tokens=coordinator.in_flight.prompt_tokens,
                cached_tokens=coordinator.in_flight.cached_tokens,
                stage_seconds=counters.stage_seconds,
                grouping=pb.GroupingCounters(**vars(counters.grouping)),
                draft_lengths=counters.draft_lengths,
                refused=self._server.refusals.counts,
                drafts={method: pb.DraftCounters(**vars(drafts)) for method, drafts in counters.drafts.items()},
            ),
            speculation=pb.SpeculationState(**vars(coordinator.lanes.speculation)) if lanes else None,
        )


def _chunk(sample: Sample, commit: Commit) -> pb.GenerateChunk:
    return pb.GenerateChunk(
        index=sample.index,
        text=commit.text,
        token_ids=commit.token_ids,
        logprobs=map(logprobs_message, commit.logprobs),
    )


async def _response(sample: Sample) -> pb.GenerateResponse:
    response = _without_logprobs(sample)
    async for logprobs in sample.logprobs():
        response.logprobs.extend(map(logprobs_message, logprobs))
    return response


def _without_logprobs(sample: Sample) -> pb.GenerateResponse:
    sequence, finish = sample.sequence, sample.sequence.finish
    assert finish is not None
    speculation = sequence.speculation
    return pb.GenerateResponse(
        request_id=sequence.request.request_id,
        index=sample.index,
        text=sample.text,
        token_ids=sequence.generated_ids,
        finish_reason=finish.reason,
        matched_token_id=finish.matched_token_id,
        matched_stop_str=finish.matched_stop,
        seed=sequence.request.sampling.seed,
        usage=pb.Usage(
            prompt_tokens=sequence.prompt_length,
            completion_tokens=sequence.num_generated,
            cached_tokens=sequence.cached_tokens,
        ),
        speculative_decoding=pb.SpeculativeDecodingStats(
            mean_acceptance_length=speculation.mean_acceptance_length,
            draft_acceptance_rate=speculation.draft_acceptance_rate,
            acceptance_histogram=speculation.histogram,
            num_spec_steps=speculation.rounds,
            num_draft_tokens=speculation.draft_tokens,
            num_accepted_draft_tokens=speculation.accepted_tokens,
        ),
        timings=pb.Timings(**vars(sample.timings)),
    )


async def _optional_state(link: WorkerLink | None) -> pb.WorkerState | None:
    return await _worker_state(link) if link is not None else None


async def _worker_state(link: WorkerLink) -> pb.WorkerState:
    load = await link.load() if link.is_ready else None
    model = _model(link.info)
    return pb.WorkerState(address=link.address, state=link.state, reason=link.reason, model=model, load=load)


def _model(info: WorkerInfo | None) -> common_pb2.ModelInfo | None:
    return model_message(info) if info is not None else None
