"""Traces of a coordinator with fake workers, as received by a collector."""

import asyncio
import itertools
import json
import logging
import time
from typing import Any

import grpc
import pytest
from collector import Collector, Received, collecting
from serving import PATIENCE_SECONDS, RecordingTarget, Serving, make_request, serving, stream
from template_target import TemplateTarget

from specpool import client
from specpool.testing import FakeOwnDraft
from specpool.v1 import generation_pb2 as pb

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
SAMPLED, NOT_SAMPLED = f"00-{TRACE}-{SPAN}-01", f"00-{TRACE}-{SPAN}-00"
CANARY = "CANARY"


def chat(text: str = CANARY, **params: Any) -> pb.GenerateRequest:
    return pb.GenerateRequest(
        request_id="mine",
        chat=pb.ChatInput(messages=[pb.ChatMessage(role="user", content=text)]),
        sampling_params=pb.SamplingParams(max_tokens=12, stop=[CANARY], **params),
    )


def requests(collector: Collector) -> list[Received]:
    return [*collector.named("chat fake"), *collector.named("text_completion fake")]


async def test_requests_have_spans_with_phases_and_rounds() -> None:
    async with collecting() as (collector, url):
        async with serving(otlp_traces_endpoint=url) as served:
            answer = await served.stub.Generate(chat(temperature=0.5, top_k=7, seed=3))
        (request,) = requests(collector)
        assert (request.kind, request.parent_id, request.service) == ("server", "", "specpool-coordinator")
        assert not request.is_fault
        attributes = request.attributes
        assert attributes.pop("gen_ai.response.time_to_first_chunk") > 0
        assert attributes == {
            "gen_ai.operation.name": "chat",
            "gen_ai.provider.name": "specpool",
            "gen_ai.request.model": "fake",
            "gen_ai.request.stream": False,
            "gen_ai.request.max_tokens": 12,
            "gen_ai.request.temperature": 0.5,
            "gen_ai.request.top_p": 1.0,
            "gen_ai.request.top_k": 7,
            "gen_ai.request.seed": 3,
            "gen_ai.request.frequency_penalty": 0.0,
            "gen_ai.request.presence_penalty": 0.0,
            "gen_ai.response.id": "mine",
            "gen_ai.response.finish_reasons": ["length"],
            "gen_ai.usage.input_tokens": answer.usage.prompt_tokens,
            "gen_ai.usage.output_tokens": 12,
            "gen_ai.usage.cache_read.input_tokens": 0,
            "specpool.request.num_speculative_tokens": 4,
            "specpool.request.draft_method": "model",
            "specpool.response.draft_tokens": answer.speculative_decoding.num_draft_tokens,
            "specpool.response.accepted_draft_tokens": answer.speculative_decoding.num_accepted_draft_tokens,
        }
        phases = [span for span in collector.children(request) if span.name != "round"]
        assert [span.name for span in phases] == ["queue", "prefill", "decode"]
        assert phases[0].began_ns == request.began_ns
        for one, other in itertools.pairwise(phases):
            assert one.ended_ns == other.began_ns
        check_rounds(collector, served, request, answer)


def check_rounds(collector: Collector, served: Serving, request: Received, answer: pb.GenerateResponse) -> None:
    rounds = [span for span in collector.children(request) if span.name == "round"]
    counters = served.process.coordinator.counters
    assert len(rounds) == counters.rounds
    assert sum(span.attributes["specpool.round.tokens"] for span in rounds) == 12
    drafted = sum(span.attributes["specpool.round.draft_tokens"] for span in rounds)
    assert drafted == answer.speculative_decoding.num_draft_tokens
    accepted = sum(span.attributes["specpool.round.accepted_draft_tokens"] for span in rounds)
    assert accepted == answer.speculative_decoding.num_accepted_draft_tokens
    sent = {request.traceparent for request in [*served.target.requests, *served.draft.requests]}
    for span in rounds:
        assert (span.trace_id, span.links) == (request.trace_id, [request.span_id])
        assert span.attributes["specpool.group.size"] == 1
        calls = collector.children(span)
        assert {call.kind for call in calls} == {"client"}
        assert calls[-1].attributes["rpc.method"] == "specpool.v1.TargetWorkerService/Verify"
        for call in calls:
            assert f"00-{call.trace_id}-{call.span_id}-01" in sent
        methods = span.attributes["specpool.round.draft_methods"]
        assert methods == (["model"] if span.attributes["specpool.round.draft_tokens"] else [])


async def test_a_carried_draft_shows_its_time_in_the_round() -> None:
    async with collecting() as (collector, url):
        async with serving(RecordingTarget(draft=FakeOwnDraft()), with_draft=False, otlp_traces_endpoint=url) as served:
            await served.stub.Generate(make_request())
        rounds = collector.named("round")
        assert max(span.attributes.get("specpool.round.own_draft_s", 0.0) for span in rounds) > 0
        assert {call.name for span in rounds for call in collector.children(span)} == {"verify"}


async def test_a_shared_round_links_all_of_its_requests() -> None:
    async with collecting() as (collector, url):
        target = RecordingTarget()
        async with serving(target, otlp_traces_endpoint=url) as served:
            target.open.clear()
            calls = [asyncio.ensure_future(served.stub.Generate(make_request([i], 20))) for i in range(3)]
            await served.until(lambda info: info.running + info.queued == 3)
            target.open.set()
            await asyncio.gather(*calls)
        ids = {span.span_id for span in requests(collector)}
        shared = [span for span in collector.named("round") if span.attributes["specpool.group.size"] == 3]
        assert shared
        for span in shared:
            assert set(span.links) == ids
            assert span.parent_id == span.links[0]
            assert span.attributes["specpool.group.traced_requests"] == 3


async def test_the_trace_context_of_the_caller_is_continued() -> None:
    async with collecting() as (collector, url):
        async with serving(otlp_traces_endpoint=url, trace_sample_rate=0.0) as served:
            for parent in (SAMPLED, NOT_SAMPLED, "nonsense", ""):
                metadata = (("traceparent", parent), ("tracestate", "vendor=1")) if parent else ()
                await served.stub.Generate(make_request(), metadata=metadata)
        (request,) = requests(collector)
        assert (request.trace_id, request.parent_id) == (TRACE, SPAN)
        assert {span.trace_id for span in collector.spans} == {TRACE}
        traced = [request.traceparent for request in served.target.requests if request.traceparent]
        assert len(traced) == len(collector.named("verify")) < len(served.target.requests)


async def test_invalid_headers_are_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    """Otherwise callers could flood the log."""
    async with collecting() as (collector, url):
        async with serving(otlp_traces_endpoint=url, with_draft=False) as served:
            for parent, state in ((SAMPLED, CANARY), (SAMPLED, f"{CANARY}=" * 500), (CANARY * 500, "")):
                metadata = (("traceparent", parent), ("tracestate", state))
                await served.stub.Generate(make_request(max_tokens=1), metadata=metadata)
        assert [span.trace_id == TRACE for span in requests(collector)] == [True, True, False]
    assert CANARY not in caplog.text


async def test_the_sample_rate_applies_to_requests_without_context() -> None:
    async with collecting() as (collector, url):
        async with serving(otlp_traces_endpoint=url, trace_sample_rate=0.5, with_draft=False) as served:
            for _ in range(40):
                await served.stub.Generate(make_request(max_tokens=1))
        assert 5 < len(requests(collector)) < 35


class PickyTarget(RecordingTarget):
    """A target that refuses only rounds with a certain token."""

    refused = 250

    async def Verify(self, request: Any, context: Any) -> Any:
        if any(self.refused in item.token_ids for item in request.items):
            await context.abort(grpc.StatusCode.INTERNAL, "told to fail")
        return await super().Verify(request, context)


async def test_spans_of_failed_requests_have_an_error_type() -> None:
    settings = {"queue_size": 0, "max_num_seqs": 1, "with_draft": False}
    async with collecting() as (collector, url):
        async with serving(PickyTarget(), otlp_traces_endpoint=url, **settings) as served:
            await fails(served.stub.Generate(pb.GenerateRequest()))
            served.target.open.clear()
            call = served.stub.GenerateStream(make_request(max_tokens=50))
            await served.until(lambda info: info.running == 1)
            await fails(served.stub.Generate(make_request(max_tokens=2)))
            call.cancel()
            served.target.open.set()
            await served.until_idle()
            await fails(served.stub.Generate(make_request([PickyTarget.refused], max_tokens=3)))
        ends = [(span.attributes.get("error.type"), span.is_fault) for span in requests(collector)]
        expected = [("INVALID_ARGUMENT", 0), ("CANCELLED", 0), ("RESOURCE_EXHAUSTED", 0), ("INTERNAL", 1)]
        assert sorted(ends) == sorted(expected)
        assert ("WorkerUnreachableError", True) in {
            (span.attributes.get("error.type"), span.is_fault) for span in collector.named("verify")
        }
        broken = next(span for span in requests(collector) if span.is_fault)
        assert broken.attributes["gen_ai.response.finish_reasons"] == ["error"]


async def fails(call: Any) -> None:
    with pytest.raises(grpc.aio.AioRpcError):
        await call


@pytest.mark.parametrize("prompts", [False, True])
async def test_prompts_and_outputs_are_recorded_only_on_request(prompts: bool) -> None:
    async with collecting() as (collector, url):
        async with serving(otlp_traces_endpoint=url, trace_prompts=prompts) as served:
            answer = await served.stub.Generate(chat())
            _, other = await stream(served, pb.GenerateRequest(text=CANARY))
            await fails(served.stub.Generate(pb.GenerateRequest(text=CANARY * 10_000)))
        assert (CANARY in collector.everything()) is prompts
        by_chat, by_text, _ = requests(collector)
        recorded = [name for span in collector.spans for name in span.attributes if name.endswith(".messages")]
        assert len(recorded) == (4 if prompts else 0)
        if prompts:
            messages = json.loads(by_chat.attributes["gen_ai.input.messages"])
            assert messages == [{"role": "user", "parts": [{"type": "text", "content": CANARY}]}]
            for span, response in ((by_chat, answer), (by_text, other)):
                (message,) = json.loads(span.attributes["gen_ai.output.messages"])
                assert message["parts"] == [{"type": "text", "content": response.text}]
                assert (message["role"], message["finish_reason"]) == ("assistant", response.finish_reason)


async def test_recorded_chats_include_tools_and_calls() -> None:
    tool = {"type": "function", "function": {"name": "f"}}
    call = {"id": "c1", "function": {"name": "f", "arguments": '{"a": 1}'}}
    messages = [
        {"role": "assistant", "tool_calls": [call], "reasoning_content": "hm"},
        {"role": "tool", "tool_call_id": "c1", "content": "2"},
    ]
    async with collecting() as (collector, url):
        target = TemplateTarget("{{ tools }}{{ messages }}")
        async with serving(target, with_draft=False, otlp_traces_endpoint=url, trace_prompts=True) as served:
            await served.stub.Generate(client.make_request(messages, tools=[tool], max_tokens=2))
        (request,) = requests(collector)
        assert json.loads(request.attributes["gen_ai.tool.definitions"]) == [tool]
        asks, told = json.loads(request.attributes["gen_ai.input.messages"])
        assert asks["parts"] == [
            {"type": "reasoning", "content": "hm"},
            {"type": "tool_call", "id": "c1", "name": "f", "arguments": '{"a": 1}'},
        ]
        assert told["parts"] == [{"type": "tool_call_response", "id": "c1", "response": "2"}]


async def test_samples_have_separate_phases() -> None:
    async with collecting() as (collector, url):
        async with serving(otlp_traces_endpoint=url) as served:
            await served.stub.Generate(make_request([1], 8, n=3, temperature=1.0, seed=2**64 - 1))
        (request,) = requests(collector)
        assert request.attributes["gen_ai.request.choice.count"] == 3
        assert "gen_ai.request.seed" not in request.attributes
        decoding = [span for span in collector.children(request) if span.name == "decode"]
        assert sorted(span.attributes["specpool.sample.index"] for span in decoding) == [0, 1, 2]


@pytest.mark.parametrize("is_silent", [False, True], ids=["unreachable", "silent"])
async def test_an_unreachable_collector_does_not_affect_requests(
    is_silent: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "20")
    monkeypatch.setattr("specpool.rpc.observability.otlp.FLUSH_SECONDS", 0.3)
    async with collecting() as (collector, url):
        collector.open.clear()
        endpoint = url if is_silent else "http://127.0.0.1:1"
        with caplog.at_level(logging.INFO):
            async with serving(otlp_traces_endpoint=endpoint, drain_seconds=0.0) as served:
                for _ in range(10):
                    await served.expect(make_request(max_tokens=6))
                stopping = time.monotonic()
        assert time.monotonic() - stopping < PATIENCE_SECONDS / 4  # the library's own bound is 30 s
    lines = [record for record in caplog.records if record.name.startswith("opentelemetry")]
    assert len(lines) <= 2


async def test_opentelemetry_variables_apply(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "x-tenant=blue")
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment.name=test")
    monkeypatch.setenv("OTEL_SERVICE_NAME", "cell-7")
    async with collecting() as (collector, url):
        async with serving(otlp_traces_endpoint=url, with_draft=False) as served:
            await served.stub.Generate(make_request(max_tokens=1))
        assert {span.service for span in collector.spans} == {"cell-7"}
        assert collector.metadata[0]["x-tenant"] == "blue"
        assert "deployment.environment.name" in collector.everything()
