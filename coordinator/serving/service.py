"""The public gRPC service."""

import asyncio
import time
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping
from functools import partial
from typing import Any

from coordinator.lanes.draft_states import draft_states
from coordinator.requests.generation import Sample
from coordinator.serving.coordinator import Coordinator
from coordinator.serving.intake import Intake
from coordinator.workers.draft_link import DraftLink
from coordinator.workers.link import WorkerLink
from coordinator.workers.states import LinkState, Recent
from specpool.environment.process import package_version
from specpool.protocol.codec import logprobs_message, model_message
from specpool.protocol.sampling import TokenLogprobs
from specpool.protocol.worker_info import WorkerInfo
from specpool.rpc.server.callers import client_of
from specpool.rpc.server.server import Server
from specpool.v1 import common_pb2, generation_pb2_grpc
from specpool.v1 import generation_pb2 as pb


class GenerationServicer(generation_pb2_grpc.GenerationServiceServicer):
    def __init__(self, coordinator: Coordinator, server: Server, intake: Intake) -> None:
        self._coordinator, self._server, self._intake = coordinator, server, intake
        self._info = Recent(self._server_info)

    async def Generate(self, request: pb.GenerateRequest, context: Any) -> pb.GenerateResponse:
        async with self._intake.generation(request, context) as (generation, _):
            texts = self._coordinator.tokenizer.token_texts
            first, *others = [await _response(sample, texts) for sample in await generation.finished()]
            first.other_samples.extend(others)
            return first

    async def GenerateStream(
        self, request: pb.GenerateRequest, context: Any
    ) -> AsyncIterator[pb.GenerateStreamResponse]:
        """Stream tokens as they are committed, at the pace of the client."""
        async with self._intake.generation(request, context, stream=True) as (generation, fail):
            message = partial(
                pb.GenerateStreamResponse,
                request_id=generation.request_id,
                starts_in_reasoning=generation.samples[0].sequence.request.starts_in_reasoning,
            )
            texts = self._coordinator.tokenizer.token_texts
            async for sample, commit in generation.stream(fail):
                if commit is None:
                    yield message(complete=await _response(sample, texts))
                elif commit.token_ids or commit.text:
                    logprobs = _logprobs(commit.token_ids, commit.logprobs, texts)
                    chunk = pb.GenerateChunk(
                        index=sample.index, text=commit.text, token_ids=commit.token_ids, logprobs=logprobs
                    )
                    yield message(chunk=chunk)

    async def Abort(self, request: pb.AbortRequest, context: Any) -> pb.AbortResponse:
        """End a request in flight of the same client."""
        self._intake.abort(request.request_id, client_of(context))
        return pb.AbortResponse()

    async def GetModelInfo(self, request: pb.GetModelInfoRequest, context: Any) -> pb.GetModelInfoResponse:
        coordinator, settings = self._coordinator, self._coordinator.settings
        tokenizer, max_model_len = coordinator.tokenizer, coordinator.max_model_len
        tags, template = tokenizer.reasoning, tokenizer.template
        drafts = [info for _, info in sorted(coordinator.lanes.drafts, key=lambda draft: not draft[0].is_ready)]
        return pb.GetModelInfoResponse(
            max_model_len=max_model_len,
            target=_model(coordinator.model),
            draft=_model(drafts[0]) if drafts else None,
            default_max_tokens=settings.default_max_tokens,
            num_speculative_tokens=settings.num_speculative_tokens,
            max_num_speculative_tokens=settings.max_num_speculative_tokens,
            has_chat_template=template is not None,
            eos_token_ids=tokenizer.files.eos_token_ids,
            served_model_name=coordinator.served_model_name,
            reasoning=pb.ReasoningTags(begin=tags.begin, end=tags.end) if tags is not None else None,
            tool_call_format=tokenizer.tool_call_format,
            chat_template_options=sorted(template.options) if template is not None else (),
        )

    async def GetServerInfo(self, request: pb.GetServerInfoRequest, context: Any) -> pb.GetServerInfoResponse:
        """Return a state of at most `RECENT_SECONDS` ago, so that frequent polls cost little."""
        return await self._info.get()

    async def _server_info(self) -> pb.GetServerInfoResponse:
        coordinator, counters = self._coordinator, self._coordinator.counters
        links: list[WorkerLink] = list({*coordinator.lanes.links, *(link for link, _ in coordinator.lanes.drafts)})
        loads = dict(zip(links, await asyncio.gather(*map(_load, links)), strict=True))
        # From here on nothing waits: lanes come, go and change roles.
        lanes, standby = list(coordinator.lanes), coordinator.lanes.standby
        draft_models = draft_states(lanes)
        drafts = [_draft_state(link, info, loads) for link, info in coordinator.lanes.drafts]
        return pb.GetServerInfoResponse(
            version=package_version(),
            uptime_s=time.monotonic() - coordinator.started,
            policy=coordinator.settings.policy,
            max_num_seqs=coordinator.lanes.max_num_seqs,
            queue_size=coordinator.settings.queue_size,
            running=coordinator.lanes.running,
            queued=coordinator.queue.queued,
            target=_worker_state(coordinator.lanes.first.link, loads) if lanes else None,
            targets=[_worker_state(lane.link, loads) for lane in lanes],
            draft=min(drafts, key=lambda worker: worker.state != LinkState.READY, default=None),
            draft_workers=drafts,
            drafts=[pb.DraftModelState(**vars(state)) for state in draft_models],
            standby=_worker_state(standby.link, loads) if standby is not None else None,
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


async def _response(sample: Sample, texts: Mapping[int, str]) -> pb.GenerateResponse:
    """Return the result of a sample. `texts`: text of each token."""
    response, token_ids = _without_logprobs(sample), iter(sample.sequence.generated_ids)
    async for logprobs in sample.logprobs():
        response.logprobs.extend(_logprobs(token_ids, logprobs, texts))
    return response


def _logprobs(
    token_ids: Iterable[int], logprobs: Iterable[TokenLogprobs], texts: Mapping[int, str]
) -> Iterator[common_pb2.TokenLogprobs]:
    """Yield the messages of log-probabilities. `token_ids` may be longer than `logprobs`."""
    for each, token_id in zip(logprobs, token_ids, strict=False):
        message = logprobs_message(each)
        message.text = texts[token_id]
        message.top_texts.extend(map(texts.__getitem__, each.top_token_ids))
        yield message


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
            accepted_prediction_tokens=speculation.accepted_prediction_tokens,
            rejected_prediction_tokens=speculation.rejected_prediction_tokens,
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
        starts_in_reasoning=sequence.request.starts_in_reasoning,
    )


Loads = Mapping[WorkerLink, common_pb2.GetWorkerInfoResponse | None]


async def _load(link: WorkerLink) -> common_pb2.GetWorkerInfoResponse | None:
    return await link.load() if link.is_ready else None


def _worker_state(link: WorkerLink, loads: Loads) -> pb.WorkerState:
    described = loads.get(link)
    load = described.load if described is not None else None
    return _state(link, link.info, load)


def _draft_state(link: WorkerLink, info: WorkerInfo | None, loads: Loads) -> pb.WorkerState:
    """The state of a draft worker, or of the draft that a target worker carries. `info`: of the draft."""
    if info is link.info:
        return _worker_state(link, loads)
    described = loads.get(link)
    load = described.draft.load if described is not None else None
    return _state(link, info, load)


def _state(link: WorkerLink, info: WorkerInfo | None, load: common_pb2.WorkerLoad | None) -> pb.WorkerState:
    draft = link.model.name if isinstance(link, DraftLink) and link.model is not None else ""
    return pb.WorkerState(
        address=link.address, state=link.state, reason=link.reason, model=_model(info), load=load, draft=draft
    )


def _model(info: WorkerInfo | None) -> common_pb2.ModelInfo | None:
    return model_message(info) if info is not None else None
