"""OpenTelemetry metrics of a coordinator with fake workers, as received by a collector."""

import logging

import pytest
from collector import collecting_metrics
from serving import make_request, serving

from specpool.rpc.observability.otlp_metrics import FIRST_TOKEN_SECONDS, TOKEN_SECONDS
from specpool.v1 import generation_pb2 as pb

FIRST_TOKEN, PER_TOKEN = "gen_ai.server.time_to_first_token", "gen_ai.server.time_per_output_token"


async def test_latencies_of_finished_samples_reach_the_collector() -> None:
    async with collecting_metrics() as (collector, url):
        async with serving(otlp_metrics_endpoint=url) as served:
            answer = await served.stub.Generate(make_request(max_tokens=12))
            await served.stub.Generate(make_request(max_tokens=1))
            chat = pb.ChatInput(messages=[pb.ChatMessage(role="user", content="Hello")])
            params = pb.SamplingParams(max_tokens=3, n=2, temperature=1)
            await served.stub.Generate(pb.GenerateRequest(chat=chat, sampling_params=params))
        assert collector.histograms.keys() == {FIRST_TOKEN, PER_TOKEN}
        counts = {
            name: {s.attributes["gen_ai.operation.name"]: s.count for s in series}
            for name, series in collector.histograms.items()
        }
        assert counts == {
            FIRST_TOKEN: {"text_completion": 2, "chat": 2},
            PER_TOKEN: {"text_completion": 1, "chat": 2},  # a single token has no time per further token
        }
        completions = collector.histograms[PER_TOKEN][0]
        assert completions.total == pytest.approx(answer.timings.decode_s / 11)
        assert (completions.service, completions.unit) == ("specpool-coordinator", "s")
        assert completions.attributes == {
            "gen_ai.operation.name": "text_completion",
            "gen_ai.provider.name": "specpool",
            "gen_ai.request.model": "fake",
            "gen_ai.response.model": "fake",
        }
        assert tuple(completions.bounds) == TOKEN_SECONDS
        assert tuple(collector.histograms[FIRST_TOKEN][0].bounds) == FIRST_TOKEN_SECONDS


async def test_an_unreachable_collector_of_metrics_costs_at_most_one_line(caplog: pytest.LogCaptureFixture) -> None:
    async with serving(otlp_metrics_endpoint="http://127.0.0.1:1") as served:
        assert (await served.stub.Generate(make_request(max_tokens=2))).finish_reason == "length"
    lines = [record for record in caplog.records if record.name.startswith("opentelemetry")]
    assert len(lines) <= 1
    assert all(record.levelno < logging.CRITICAL and record.exc_info is None for record in lines)
