"""The coordinator's metrics: counts after known requests, vLLM's names, and invalid settings."""

import asyncio
from itertools import accumulate

import grpc
import pytest
from scraping import Scrape, scrape
from serving import RecordingTarget, Serving, make_request, serving, stream

from coordinator.config.settings import CoordinatorSettings
from specpool.rpc.ports import free_port
from specpool.testing import FakeOwnDraft
from specpool.v1 import generation_pb2 as pb

SPEC = "specpool:spec_decode_num_"
# Read by the router of production-stack, and by the endpoint picker of the Gateway API inference extension.
READ_BY_ROUTERS = (
    "vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc",
    "vllm:gpu_prefix_cache_hits_total", "vllm:gpu_prefix_cache_queries_total", "vllm:prefix_cache_hits_total",
    "vllm:prefix_cache_queries_total",
)  # fmt: skip


async def scraped(served: Serving) -> Scrape:
    """A scrape after all slots are released."""
    await served.until_idle()
    port = served.process.coordinator.settings.metrics_port
    assert port is not None
    return await scrape(port)


async def test_counters_agree_with_the_responses() -> None:
    kinds = [(4, 1), (2, 3), (0, 1)]
    requests = [make_request([i, *range(36)], 24, k=k, n=n, temperature=1) for i, (k, n) in enumerate(kinds)]
    async with serving(metrics_port=free_port()) as served:
        answers = await asyncio.gather(*map(served.stub.Generate, requests))
        seen = await scraped(served)
        info = await served.info()
    samples = [sample for answer in answers for sample in (answer, *answer.other_samples)]
    stats = [sample.speculative_decoding for sample in samples]
    tokens = sum(sample.usage.completion_tokens for sample in samples)

    assert seen.value(f"{SPEC}drafts_total") == sum(stat.num_spec_steps for stat in stats) > 0
    assert seen.value(f"{SPEC}draft_tokens_total") == sum(stat.num_draft_tokens for stat in stats)
    assert seen.value(f"{SPEC}accepted_tokens_total") == sum(stat.num_accepted_draft_tokens for stat in stats) > 0
    assert seen.values(f"{SPEC}accepted_tokens_per_pos_total") == per_position(stats, limit=4)
    assert seen.value("specpool:prompt_tokens_total") == sum(sample.usage.prompt_tokens for sample in samples) == 185
    assert seen.value("specpool:prefix_cache_queries_total") == 185
    cached = sum(sample.usage.cached_tokens for sample in samples)
    assert seen.value("specpool:prefix_cache_hits_total") == cached == 64  # two samples found two pages each
    assert seen.value("specpool:generation_tokens_total") == tokens == 5 * 24
    assert seen.value("specpool:request_success_total", finished_reason="length") == len(samples)
    assert seen.value("specpool:requests_total") == len(requests)
    assert seen.value("specpool:draft_tokens_total", method="model") == seen.value(f"{SPEC}draft_tokens_total")
    assert seen.value("specpool:accepted_draft_tokens_total", method="ngram") == 0
    assert seen.value("specpool:accepted_draft_tokens_total", method="grammar") == 0

    histogram = {le: seen.value("specpool:draft_length_bucket", le=le) for le in ("0", "1", "2", "4", "+Inf")}
    lengths = dict(enumerate(accumulate(info.counters.draft_lengths)))
    assert histogram == {"0": lengths[0], "1": lengths[1], "2": lengths[2], "4": lengths[4], "+Inf": lengths[4]}
    assert seen.value("specpool:group_size_count") == info.counters.rounds
    assert seen.value("specpool:group_size_bucket", le="1") == info.counters.grouping.group_sizes[0]
    grouping = info.counters.grouping
    same, mixed = grouping.same_length_rounds, grouping.mixed_rounds
    rounds = {"single": info.counters.rounds - same - mixed, "same_length": same, "mixed": mixed}
    assert seen.values("specpool:rounds_total") == {(("grouping", name),): value for name, value in rounds.items()}
    stages = {
        dict(labels)["stage"]: value for labels, value in seen.values("specpool:round_stage_seconds_total").items()
    }
    assert stages == pytest.approx(dict(info.counters.stage_seconds))


def per_position(stats: list[pb.SpeculativeDecodingStats], limit: int) -> dict[tuple[tuple[str, str], ...], float]:
    """Accepted draft tokens by position, from the responses."""
    return {
        (("position", str(position)),): sum(sum(stat.acceptance_histogram[position + 1 :]) for stat in stats)
        for position in range(limit)
    }


async def test_latencies_are_observed_once_per_sample_and_commit() -> None:
    async with serving(metrics_port=free_port()) as served:
        chunks, complete = await stream(served, make_request(k=4))
        seen = await scraped(served)
    timings = complete.timings
    sums = {
        "time_to_first_token_seconds": timings.time_to_first_token_s,
        "e2e_request_latency_seconds": timings.total_s,
        "request_queue_time_seconds": timings.queue_s,
        "request_prefill_time_seconds": timings.prefill_s,
        "request_decode_time_seconds": timings.decode_s,
        "request_time_per_output_token_seconds": timings.decode_s / 23,
        "request_prompt_tokens": 3,
        "request_generation_tokens": 24,
    }
    assert {name: seen.value(f"specpool:{name}_sum") for name in sums} == pytest.approx(sums)
    assert {seen.value(f"specpool:{name}_count") for name in sums} == {1}
    # All tokens of a commit are one observation.
    between = "specpool:inter_token_latency_seconds"
    assert seen.value(f"{between}_count") == len(chunks) - 1 < 23
    assert seen.value(f"{between}_sum") == pytest.approx(timings.decode_s, abs=0.005)


async def test_gauges_show_waiting_and_running_samples() -> None:
    target = RecordingTarget()
    async with serving(target, max_num_seqs=2, queue_size=5, metrics_port=free_port()) as served:
        target.open.clear()
        calls = [served.stub.Generate(make_request([1, 0], 14))]
        await served.until(lambda info: info.running == 1)
        calls += [served.stub.Generate(make_request([1, seed], 14)) for seed in (1, 2)]
        await served.until(lambda info: (info.running, info.queued) == (1, 2))
        port = served.process.coordinator.settings.metrics_port
        assert port is not None
        seen = await scrape(port)
        assert seen.value("specpool:num_requests_running") == seen.value("specpool:window_used") == 1
        assert seen.value("specpool:num_requests_waiting") == 2
        assert seen.value("specpool:prompt_tokens_waiting") == 4
        assert seen.value("specpool:num_requests_waiting_limit") == 5
        assert seen.value("specpool:window_size") == 2
        assert seen.value("specpool:kv_cache_usage_perc") == pytest.approx(1 / 16)  # the fake counts slots only
        calls[2].cancel()
        await served.until(lambda info: info.queued == 1)
        target.open.set()
        await asyncio.gather(*calls[:2])
        seen = await scraped(served)
    ends = {
        dict(labels)["finished_reason"]: count
        for labels, count in seen.values("specpool:request_success_total").items()
    }
    assert ends == {"length": 2, "abort": 1, "stop": 0, "error": 0}
    assert seen.value("specpool:kv_cache_usage_perc") == seen.value("specpool:window_used") == 0
    assert seen.value("specpool:e2e_request_latency_seconds_count") == 2
    assert seen.value("specpool:prompt_tokens_total") == 4  # samples with a first token


async def test_calls_and_links_have_metrics_before_the_target_is_ready() -> None:
    async with serving(with_target=False, metrics_port=free_port()) as served:
        with pytest.raises(grpc.aio.AioRpcError, match="UNAVAILABLE"):
            await served.stub.Generate(make_request())
        with pytest.raises(grpc.aio.AioRpcError, match="NOT_FOUND"):
            await served.stub.Abort(pb.AbortRequest(request_id="none"))
        port = served.process.coordinator.settings.metrics_port
        assert port is not None
        seen = await scrape(port)
        async with asyncio.timeout(30):  # a call is counted a moment after its answer
            while len(seen.calls()) < 2:
                seen = await scrape(port)
    service = "specpool.v1.GenerationService"
    assert seen.calls() == {(service, "Generate", "Unavailable"): 1, (service, "Abort", "NotFound"): 1}
    states = {labels: value for labels, value in seen.values("specpool:worker_link_state").items() if value}
    addresses = {"draft": served.draft_address, "target": served.target_address}
    expected = [{"worker": worker, "address": address, "state": "connecting"} for worker, address in addresses.items()]
    assert states == {tuple(sorted(labels.items())): 1 for labels in expected}
    assert "specpool:num_requests_running" not in seen.families


async def test_a_carried_draft_has_no_link_state() -> None:
    async with serving(RecordingTarget(draft=FakeOwnDraft()), with_draft=False, metrics_port=free_port()) as served:
        await served.expect(make_request())
        seen, info = await scraped(served), await served.info()
    assert {dict(labels)["worker"] for labels in seen.values("specpool:worker_link_state")} == {"target"}
    assert [(draft.address, draft.state) for draft in info.draft_workers] == [(served.target_address, "ready")]
    assert seen.value("specpool:round_stage_seconds_total", stage="draft") > 0


async def test_metrics_under_vllm_names_have_the_same_values() -> None:
    async with serving(metrics_port=free_port(), metrics_compat="vllm", served_model_name="qwen") as served:
        await served.expect(make_request(k=3))
        seen = await scraped(served)
    vllm_names = [name for name in seen.families if name.startswith("vllm:")]
    assert set(READ_BY_ROUTERS) <= {sample.name for name in vllm_names for sample in seen.families[name].samples}
    for name in vllm_names:
        now = name.replace("gpu_cache", "kv_cache").replace("gpu_prefix", "prefix")
        ours = seen.families[now.replace("vllm:", "specpool:")].samples
        assert [sample.value for sample in seen.families[name].samples] == [sample.value for sample in ours]
        assert {sample.labels["engine"] for sample in seen.families[name].samples} == {"0"}
    assert seen.value("vllm:generation_tokens_total") == 24
    for name in ("specpool:num_requests_running", "vllm:num_requests_running"):
        assert seen.families[name].samples[0].labels["model_name"] == "qwen"


@pytest.mark.parametrize(
    ("flags", "refusal"),
    [
        (["--metrics-port", "0"], "metrics-port: Input should be greater than or equal to 1"),
        (["--metrics-compat", "vllm"], "--metrics-compat needs a --metrics-port"),
        (["--metrics-port", "9000", "--metrics-compat", "tgi"], "metrics-compat: Input should be 'vllm'"),
        (["--metrics-port", "50050"], "--port, --health-port and --metrics-port must differ"),
        (["--metrics-port", "9000", "--health-port", "9000"], "--port, --health-port and --metrics-port must differ"),
    ],
)
def test_invalid_flags_fail_with_one_line(flags: list[str], refusal: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        CoordinatorSettings.load("specpool-coordinator", flags)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"specpool-coordinator: {refusal}")
