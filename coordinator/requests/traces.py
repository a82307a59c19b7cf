"""The coordinator's traces of requests and rounds. Without a tracer, nothing is recorded.

A request span has children for queue, prefill and decode. A round span is a child of its first traced request, and
links to all of them. Calls to workers are children of the round, and parents of the workers' own spans.
"""

import json
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from coordinator.requests.generation import Generation, Sample
from coordinator.scheduling.commits import Commit
from coordinator.scheduling.grouping import Group
from coordinator.scheduling.sequence import FinishReason
from specpool.rpc.observability import logs
from specpool.rpc.observability.tracing import Attributes, Span, Tracer
from specpool.v1 import generation_pb2 as pb

_METHODS = {"propose": "specpool.v1.DraftWorkerService/Propose", "verify": "specpool.v1.TargetWorkerService/Verify"}
# Maximum integer attribute.
_INT64_MAX = 2**63 - 1


@dataclass(frozen=True)
class Call:
    """A call before its request is validated."""

    operation: str
    """Operation name of the GenAI conventions: "chat" or "text_completion"."""
    stream: bool
    metadata: Iterable[tuple[str, Any]]
    """May include the caller's trace context."""
    prompt: Callable[[], Attributes] = dict
    """Returns the attributes of the prompt; none if it consists of token ids."""


class RequestTrace:
    """The trace of one request; without a span, nothing is recorded."""

    def __init__(
        self, span: Span | None = None, began_ns: int = 0, prompt: Callable[[], Attributes] | None = None
    ) -> None:
        """`prompt`: returns the attributes of the prompt. None: record neither prompt nor output."""
        self.span, self._began_ns, self._prompt = span, began_ns, prompt
        self.samples: list[Sample] = []
        self._error: BaseException | None = None

    def failed(self, error: BaseException) -> None:
        """Record why the request failed. Its handler may only see a cancellation."""
        self._error = self._error or error

    def begin(self, span: Span, samples: list[Sample]) -> None:
        """Record the parameters of a validated request, and its prompt if enabled."""
        self.samples = samples
        span.note(_parameters(samples, self._prompt is not None))
        if self._prompt is not None:
            span.note(self._prompt())

    def end(self, span: Span) -> None:
        """Record the results, and derive child spans from the samples' timings."""
        if self.samples:
            reasons = [_finish_reason(sample, self._error) for sample in self.samples]
            span.note(_results(self.samples, reasons))
            if self._prompt is not None:
                span.note({"gen_ai.output.messages": _output_messages(self.samples, reasons)})
        for sample in self.samples:
            self._add_phases(span, sample)
        if self._error is not None:
            span.failed(self._error)
        span.end()

    def _add_phases(self, span: Span, sample: Sample) -> None:
        began_ns, timings = self._began_ns, sample.timings
        for name, seconds in (("queue", timings.queue_s), ("prefill", timings.prefill_s), ("decode", timings.decode_s)):
            if not seconds:  # the phase never began
                continue
            phase = span.child(name, began_ns=began_ns)
            if len(self.samples) > 1:
                phase.note({"specpool.sample.index": sample.index})
            began_ns += int(seconds * 1e9)
            phase.end(began_ns)


class RoundTrace:
    """The trace of one round; without a span, nothing is recorded."""

    def __init__(self, span: Span | None = None) -> None:
        self._span = span

    @contextmanager
    def calling(self, method: str, round_id: int) -> Iterator[str]:
        """A context for a worker's "propose" or "verify". Yields the `traceparent` to send; empty without a trace."""
        if self._span is None:
            yield ""
            return
        with self._span.child(method, "client").ending() as span:
            span.note({"rpc.system.name": "grpc", "rpc.method": _METHODS[method], "specpool.round.id": round_id})
            yield span.traceparent

    def committed(self, round_id: int, commits: Sequence[Commit], cache_misses: int, own_draft_s: float) -> None:
        """Record the results of the round. `own_draft_s`: seconds of the draft that the target worker carries."""
        if self._span is None:
            return
        if own_draft_s:
            self._span.note({"specpool.round.own_draft_s": own_draft_s})
        self._span.note(
            {
                "specpool.round.id": round_id,
                "specpool.round.tokens": sum(len(commit.token_ids) for commit in commits),
                "specpool.round.draft_tokens": sum(commit.drafted + commit.forced for commit in commits),
                "specpool.round.accepted_draft_tokens": sum(
                    commit.accepted + commit.accepted_forced for commit in commits
                ),
                "specpool.round.draft_methods": sorted({str(commit.method) for commit in commits if commit.method}),
                "specpool.round.cache_misses": cache_misses,
            }
        )


class Traces:
    """Traces of the requests that the tracer samples, and of their rounds."""

    def __init__(
        self, tracer: Tracer | None = None, model: Callable[[], str] = str, record_prompts: bool = False
    ) -> None:
        """`model`: the name of the target model. `record_prompts`: whether to record prompts and outputs."""
        self._tracer, self._model, self._record_prompts = tracer, model, record_prompts
        self._spans: dict[int, Span] = {}
        """Spans of traced requests in flight, by sequence id."""

    @contextmanager
    def request(self, describe: Callable[[], Call]) -> Iterator[RequestTrace]:
        """A context that serves a request."""
        if self._tracer is None:
            yield RequestTrace()
            return
        began_ns, model, call = time.time_ns(), self._model(), describe()
        span = self._tracer.request(f"{call.operation} {model}".strip(), call.metadata, began_ns)
        if span is None:
            yield RequestTrace()
            return
        logs.bind_trace(span.trace_id)
        span.note({"gen_ai.operation.name": call.operation, "gen_ai.provider.name": "specpool"})
        span.note({"gen_ai.request.stream": call.stream, **({"gen_ai.request.model": model} if model else {})})
        trace = RequestTrace(span, began_ns, call.prompt if self._record_prompts else None)
        try:
            yield trace
        except BaseException as error:
            trace.failed(error)
            raise
        finally:
            for sample in trace.samples:
                self._spans.pop(sample.sequence.sequence_id, None)
            trace.end(span)

    def follow(self, trace: RequestTrace, generation: Generation) -> None:
        """Record the generation of a request once it has begun."""
        if trace.span is not None:
            trace.begin(trace.span, generation.samples)
            self._spans.update({sample.sequence.sequence_id: trace.span for sample in generation.samples})

    @contextmanager
    def round(self, group: Group) -> Iterator[RoundTrace]:
        """A context that runs the round of a group."""
        ids = (sequence.sequence_id for sequence in group.sequences) if self._spans else ()
        spans = list(dict.fromkeys(self._spans[i] for i in ids if i in self._spans))
        if not spans:
            yield RoundTrace()
            return
        with spans[0].child("round", links=spans).ending() as span, logs.bound_trace(span.trace_id):
            span.note({"specpool.group.size": len(group.sequences), "specpool.group.traced_requests": len(spans)})
            yield RoundTrace(span)


def _parameters(samples: list[Sample], prompts: bool) -> Attributes:
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


def _results(samples: list[Sample], reasons: list[str]) -> Attributes:
    first = samples[0]
    return {
        "gen_ai.usage.input_tokens": first.sequence.prompt_length,
        "gen_ai.usage.output_tokens": sum(sample.sequence.num_generated for sample in samples),
        "gen_ai.usage.cache_read.input_tokens": first.sequence.cached_tokens,
        "gen_ai.response.finish_reasons": reasons,
        "gen_ai.response.time_to_first_chunk": first.timings.time_to_first_token_s,
        "specpool.response.draft_tokens": sum(sample.sequence.speculation.draft_tokens for sample in samples),
        "specpool.response.accepted_draft_tokens": sum(
            sample.sequence.speculation.accepted_tokens for sample in samples
        ),
    }


def _finish_reason(sample: Sample, error: BaseException | None) -> str:
    """The API's finish reason, or "error". A disconnected client is not an error."""
    finish = sample.sequence.finish
    if finish is None or (finish.reason is FinishReason.ABORT and isinstance(error, Exception)):
        return "error"
    return str(finish.reason)


def _output_messages(samples: list[Sample], reasons: list[str]) -> str:
    answers = zip((sample.text for sample in samples), reasons, strict=True)
    return json.dumps(
        [{"role": "assistant", "parts": [text_part(text)], "finish_reason": reason} for text, reason in answers]
    )


def prompt_attributes(request: pb.GenerateRequest) -> Attributes:
    """Return the attributes of a prompt. None for token ids, which are not detokenized."""
    if request.text:
        return {"gen_ai.input.messages": json.dumps([{"role": "user", "parts": [text_part(request.text)]}])}
    if not request.chat.messages:
        return {}
    messages = [{"role": message.role, "parts": _parts(message)} for message in request.chat.messages]
    tools = {"gen_ai.tool.definitions": f"[{', '.join(request.chat.tools)}]"} if request.chat.tools else {}
    return {"gen_ai.input.messages": json.dumps(messages), **tools}


def text_part(text: str) -> dict[str, Any]:
    return {"type": "text", "content": text}


def _parts(message: pb.ChatMessage) -> list[dict[str, Any]]:
    if message.role == "tool":
        return [{"type": "tool_call_response", "id": message.tool_call_id, "response": message.content}]
    reasoning = [{"type": "reasoning", "content": message.reasoning_content}] if message.reasoning_content else []
    calls = [
        {"type": "tool_call", "id": call.id, "name": call.function.name, "arguments": call.function.arguments}
        for call in message.tool_calls
    ]
    return [*reasoning, *([text_part(message.content)] if message.content or not calls else []), *calls]
