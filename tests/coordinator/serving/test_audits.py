"""Audits of a running coordinator: wrong tokens are found, requests go first, and nobody else notices."""

import asyncio
import logging
from typing import Any

import pytest
from scraping import scrape
from serving import RecordingTarget, Serving, make_request, serving

from specpool.rpc.ports import free_port
from specpool.testing import FakeTarget, fake_target
from specpool.v1 import common_pb2, target_worker_pb2

PATIENCE_SECONDS = 10


async def audited(served: Serving, count: int) -> dict[str, int]:
    """The results, once there are this many."""
    results = served.process.coordinator.auditor.results
    async with asyncio.timeout(PATIENCE_SECONDS):
        while results.total() < count:  # noqa: ASYNC110 - the auditor has no event for it
            await asyncio.sleep(0.01)
    return dict(+results)


async def until_replaying(served: Serving) -> None:
    async with asyncio.timeout(PATIENCE_SECONDS):
        while not served.process.coordinator.lanes.first.window.background:  # noqa: ASYNC110
            await asyncio.sleep(0.01)


class WrongTarget(RecordingTarget):
    """Gives one wrong token, after draft tokens."""

    wrong: int | None = None

    def _verify(
        self, key: tuple[str, int], item: target_worker_pb2.VerifyItem, round_id: int
    ) -> target_worker_pb2.VerifyResult:
        result = super()._verify(key, item, round_id)
        if self.wrong is None and len(item.draft_token_ids) and result.token_ids:
            self.wrong = (result.token_ids[-1] + 2) % 256  # 1 more is what the draft worker gets wrong
            result.token_ids[-1] = self.yielded[key][1][-1] = self.wrong
        return result


async def test_equal_answers_pass_with_every_kind_of_request() -> None:
    requests = [
        make_request([1, 2, 3], 40),
        make_request([1, 2, 3], 40, n=3, temperature=0.7, seed=5),
        make_request(range(200), 30, k=0),
        make_request([4], 12, logprobs=5, stop_token_ids=[7], logit_bias={3: 1.0}),
        make_request([5], 20, stop=["a", "b", "c"]),
    ]
    async with serving(RecordingTarget(eos_rate=0.02), audit_share=1.0) as served:
        await asyncio.gather(*map(served.stub.Generate, requests))
        assert await audited(served, 7) == {"equal": 7}
        await served.until_idle()
        served.process.coordinator.lanes.first.window.check_integrity()


async def test_replays_are_plain_and_fresh() -> None:
    request = make_request(range(100), 20, temperature=0.5, seed=3)
    async with serving(audit_share=1.0) as served:
        await served.stub.Generate(request)
        target = served.target
        assert isinstance(target, RecordingTarget)
        first_id = target.requests[0].items[0].sequence_id
        await audited(served, 1)
        items = [item for each in target.requests for item in each.items if item.sequence_id != first_id]
        first = items[0]
        assert (first.base_length, first.HasField("cache_namespace"), first.expected_prefix_length) == (0, False, 0)
        assert (first.sampling.seed, first.sampling.temperature) == (3, 0.5)
        assert not any(item.draft_token_ids or item.max_draft_tokens or item.branches for item in items)


async def test_a_wrong_token_is_found(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    top = common_pb2.TokenLogprobs(logprob=-1.0, top_token_ids=[1, 2], top_logprobs=[-1.0, -1.25])
    monkeypatch.setattr(fake_target, "_logprobs", lambda count: top)
    target = WrongTarget()
    async with serving(target, audit_share=1.0, metrics_port=free_port()) as served:
        response = await served.stub.Generate(make_request([1, 2, 3], 30, request_id="suspect"))
        assert await audited(served, 1) == {"different": 1}
        seen = await scrape(served.process.coordinator.settings.metrics_port or 0)
    expected = target.continuation([1, 2, 3], 30)
    position = next(i for i in range(30) if response.token_ids[i] != expected[i])
    (record,) = [record for record in caplog.records if record.name == "coordinator.serving.auditor"]
    assert record.levelno == logging.WARNING
    assert record.getMessage() == (
        f"audit of request 'suspect': plain decoding gives another token at position {position} of the answer: "
        f"{expected[position]} instead of {target.wrong}, top-2 margin of the logits 0.25"
    )
    assert seen.value("specpool:audited_requests_total", result="different") == 1
    assert seen.value("specpool:audited_requests_total", result="equal") == 0


async def test_audits_count_in_no_statistics_of_requests() -> None:
    async with serving(audit_share=1.0, metrics_port=free_port()) as served:
        await served.stub.Generate(make_request([1, 2, 3], 24))
        await audited(served, 1)
        info = await served.until_idle()
        assert info.counters.requests == 1
        assert dict(info.counters.finished) == {"length": 1}
        assert (info.counters.completion_tokens, info.counters.prompt_tokens) == (24, 3)
        seen = await scrape(served.process.coordinator.settings.metrics_port or 0)
        assert seen.value("specpool:generation_tokens_total") == 24
        assert seen.value("specpool:prompt_tokens_total") == 3
        assert seen.value("specpool:e2e_request_latency_seconds_count") == 1
        assert seen.value("specpool:time_to_first_token_seconds_count") == 1


@pytest.mark.parametrize("settings", [{"policy": "eqspec"}, {"max_num_seqs": 1}], ids=str)
async def test_replays_give_their_places_to_requests(settings: dict[str, Any]) -> None:
    target = RecordingTarget(pass_seconds=lambda rows: 0.005)
    async with serving(target, audit_share=1.0, with_draft=False, queue_size=4, **settings) as served:
        await served.stub.Generate(make_request([1], 100))
        await until_replaying(served)
        served.process.coordinator.auditor._share = lambda: 0.0
        places = served.process.coordinator.lanes.first.window.max_num_seqs
        await asyncio.gather(*(served.expect(make_request([2, i], 20)) for i in range(min(places, 4))))
        assert await audited(served, 1) == {"aborted": 1}
        served.process.coordinator.lanes.first.window.check_integrity()


@pytest.mark.slow
async def test_replays_wait_for_room() -> None:
    target = RecordingTarget(pass_seconds=lambda rows: 0.002)
    async with serving(target, audit_share=1.0, with_draft=False, max_num_seqs=4) as served:
        long = [asyncio.create_task(served.expect(make_request([i], 200))) for i in range(3)]
        await served.expect(make_request([9], 4))
        await asyncio.sleep(0.2)
        assert not served.process.coordinator.lanes.first.window.background
        assert not any(task.done() for task in long)
        await asyncio.gather(*long)
        assert await audited(served, 4) == {"equal": 4}


class NumericTarget(FakeTarget):
    """Does not claim exact numerics."""

    async def GetWorkerInfo(self, request: Any, context: Any) -> common_pb2.GetWorkerInfoResponse:
        response = await super().GetWorkerInfo(request, context)
        response.model.equivalence = common_pb2.EQUIVALENCE_NUMERIC
        return response


@pytest.mark.parametrize(
    ("target", "setting", "share"),
    [
        (FakeTarget, None, 0.001),
        (NumericTarget, None, 0.0),
        (NumericTarget, 0.5, 0.5),
        (FakeTarget, 0.0, 0.0),
    ],
)
async def test_the_default_share_depends_on_the_target(
    target: type[FakeTarget], setting: float | None, share: float
) -> None:
    async with serving(target(), with_draft=False, audit_share=setting) as served:
        assert served.process.coordinator.audit_share == share


@pytest.mark.slow
async def test_shutdown_does_not_wait_for_a_replay() -> None:
    target = RecordingTarget(pass_seconds=lambda rows: 0.02)
    async with serving(target, audit_share=1.0, with_draft=False, drain_seconds=20.0) as served:
        await served.stub.Generate(make_request([1], 100))
        await until_replaying(served)
        began = asyncio.get_running_loop().time()
        served.process.server.stop()
        await served.process.wait_stopped()
        assert asyncio.get_running_loop().time() - began < 1.5
        assert served.process.coordinator.auditor.results["aborted"] == 1
        assert not target.caches
