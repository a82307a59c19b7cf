"""The traces of a coordinator that records them.

A request has a span, with children for queue, prefill and decode. A round has one if a traced request is in it: it is a
child of the first such request, and linked to all of them. So a trace has all rounds of its request if no
other traced request is in them. A round's calls to the workers are its children, and the workers' spans are children of
those calls.
"""

import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from coordinator.requests.generation import Generation, Sample
from coordinator.scheduling.commits import Commit
from coordinator.scheduling.grouping import Group
from coordinator.scheduling.sequence import FinishReason
from coordinator.tracing.traces import UNTRACED, Asked, Messages, RequestTrace, RoundTrace, Traces
from specpool.rpc.observability import logs
from specpool.rpc.observability.tracing import Attributes, Span, Tracer

_METHODS = {"propose": "specpool.v1.DraftWorkerService/Propose", "verify": "specpool.v1.TargetWorkerService/Verify"}
# The largest integer that an attribute can hold.
_INT64_MAX = 2**63 - 1


class RecordedTraces(Traces):
    """Traces of the requests that the tracer samples, and of their rounds."""

    def __init__(self, tracer: Tracer, model: Callable[[], str], prompts: bool) -> None:
        """`model`: the name of the target model. `prompts`: whether prompts and outputs are recorded too."""
        self._tracer, self._model, self._prompts = tracer, model, prompts
        self._spans: dict[int, Span] = {}
        """The spans of traced requests in flight, by the ids of their sequences."""

    @contextmanager
    def request(self, asked: Callable[[], Asked]) -> Iterator[RequestTrace]:
        began_ns, model, call = time.time_ns(), self._model(), asked()
        span = self._tracer.request(f"{call.operation} {model}".strip(), call.metadata, began_ns)
        if span is None:
            yield RequestTrace()
            return
        logs.bind_trace(span.trace_id)
        span.note({"gen_ai.operation.name": call.operation, "gen_ai.provider.name": "specpool"})
        span.note({"gen_ai.request.stream": call.stream, **({"gen_ai.request.model": model} if model else {})})
        trace = RecordedRequest(span, began_ns, self._spans, call.messages if self._prompts else None)
        try:
            yield trace
        except BaseException as error:
            trace.failed(error)
            raise
        finally:
            trace.end()

    def round(self, group: Group) -> AbstractContextManager[RoundTrace]:
        ids = (sequence.sequence_id for sequence in group.sequences)
        requests = list(dict.fromkeys(self._spans[each] for each in ids if each in self._spans))
        return _recorded_round(requests, len(group.sequences)) if requests else UNTRACED.round(group)


class RecordedRequest(RequestTrace):
    """The trace of a request that is sampled."""

    def __init__(
        self, span: Span, began_ns: int, spans: dict[int, Span], prompt: Callable[[], Messages] | None
    ) -> None:
        """`prompt`: the prompt, if it and the output are to be recorded."""
        self._span, self._began_ns, self._spans, self._prompt = span, began_ns, spans, prompt
        self._samples: list[Sample] = []
        self._error: BaseException | None = None

    def follow(self, generation: Generation) -> None:
        self._samples = generation.samples
        self._spans.update(dict.fromkeys(self._ids, self._span))
        self._span.note(_asked_for(generation.samples, self._prompt is not None))
        if self._prompt is not None and (messages := self._prompt()):  # no refused one, which may be of any length
            self._span.note({"gen_ai.input.messages": _input_messages(messages)})

    def failed(self, error: BaseException) -> None:
        self._error = self._error or error

    def end(self) -> None:
        """Ends the span, and makes its child spans from the samples' timings."""
        for each in self._ids:
            del self._spans[each]
        if self._samples:
            reasons = [_finish_reason(sample, self._error) for sample in self._samples]
            self._span.note(_answered(self._samples, reasons))
            if self._prompt is not None:
                self._span.note({"gen_ai.output.messages": _output_messages(self._samples, reasons)})
        for sample in self._samples:
            self._add_phases(sample)
        if self._error is not None:
            self._span.failed(self._error)
        self._span.end()

    @property
    def _ids(self) -> list[int]:
        return [sample.sequence.sequence_id for sample in self._samples]

    def _add_phases(self, sample: Sample) -> None:
        began_ns, timings = self._began_ns, sample.timings
        for name, seconds in (("queue", timings.queue), ("prefill", timings.prefill), ("decode", timings.decode)):
            if not seconds:  # the phase never began
                continue
            phase = self._span.child(name, began_ns=began_ns)
            if len(self._samples) > 1:
                phase.note({"specpool.sample.index": sample.index})
            began_ns += int(seconds * 1e9)
            phase.end(began_ns)


class RecordedRound(RoundTrace):
    """The trace of a round in which a request is traced."""

    def __init__(self, span: Span) -> None:
        self._span = span

    @contextmanager
    def calling(self, method: str, round_id: int) -> Iterator[str]:
        with self._span.child(method, "client").ending() as span:
            span.note({"rpc.system.name": "grpc", "rpc.method": _METHODS[method], "specpool.round.id": round_id})
            yield span.traceparent

    def committed(self, round_id: int, commits: Sequence[Commit], cache_misses: int) -> None:
        self._span.note(
            {
                "specpool.round.id": round_id,
                "specpool.round.tokens": sum(len(commit.token_ids) for commit in commits),
                "specpool.round.draft_tokens": sum(commit.drafted for commit in commits),
                "specpool.round.accepted_draft_tokens": sum(commit.accepted for commit in commits),
                "specpool.round.draft_methods": sorted({str(commit.method) for commit in commits if commit.method}),
                "specpool.round.cache_misses": cache_misses,
            }
        )


@contextmanager
def _recorded_round(requests: list[Span], group_size: int) -> Iterator[RoundTrace]:
    with requests[0].child("round", links=requests).ending() as span, logs.bound_trace(span.trace_id):
        span.note({"specpool.group.size": group_size, "specpool.group.traced_requests": len(requests)})
        yield RecordedRound(span)


def _asked_for(samples: list[Sample], prompts: bool) -> Attributes:
    request = samples[0].sequence.request
    sampling = request.sampling
    attributes: dict[str, Any] = {
        "gen_ai.response.id": request.request_id,
        "gen_ai.request.max_tokens": request.max_tokens,
        "gen_ai.request.temperature": sampling.temperature,
        "gen_ai.request.top_p": sampling.top_p,
        "gen_ai.request.frequency_penalty": sampling.frequency_penalty,
        "gen_ai.request.presence_penalty": sampling.presence_penalty,
        "specpool.request.num_speculative_tokens": request.num_speculative_tokens,
        "specpool.request.draft_method": str(request.method),
    }
    if sampling.top_k:
        attributes["gen_ai.request.top_k"] = sampling.top_k
    if sampling.seed <= _INT64_MAX:
        attributes["gen_ai.request.seed"] = sampling.seed
    if len(samples) > 1:
        attributes["gen_ai.request.choice.count"] = len(samples)
    if prompts and request.stop:
        attributes["gen_ai.request.stop_sequences"] = list(request.stop)
    return attributes


def _answered(samples: list[Sample], reasons: list[str]) -> Attributes:
    first = samples[0]
    return {
        "gen_ai.usage.input_tokens": first.sequence.prompt_length,
        "gen_ai.usage.output_tokens": sum(sample.sequence.num_generated for sample in samples),
        "gen_ai.usage.cache_read.input_tokens": first.sequence.cached_tokens,
        "gen_ai.response.finish_reasons": reasons,
        "gen_ai.response.time_to_first_chunk": first.timings.first_token,
        "specpool.response.draft_tokens": sum(sample.sequence.speculation.draft_tokens for sample in samples),
        "specpool.response.accepted_draft_tokens": sum(
            sample.sequence.speculation.accepted_tokens for sample in samples
        ),
    }


def _finish_reason(sample: Sample, error: BaseException | None) -> str:
    """The API's name of the finish reason; "error" if an error cut the sample off. A client that leaves is no error."""
    finish = sample.sequence.finish
    if finish is None or (finish.reason is FinishReason.ABORT and isinstance(error, Exception)):
        return "error"
    return str(finish.reason)


def _input_messages(messages: Messages) -> str:
    return json.dumps([{"role": role, "parts": [_text(text)]} for role, text in messages])


def _output_messages(samples: list[Sample], reasons: list[str]) -> str:
    texts = ("".join(piece.text for piece in sample.pieces) for sample in samples)
    answers = zip(texts, reasons, strict=True)
    return json.dumps(
        [{"role": "assistant", "parts": [_text(text)], "finish_reason": reason} for text, reason in answers]
    )


def _text(text: str) -> dict[str, str]:
    return {"type": "text", "content": text}
