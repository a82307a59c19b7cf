"""Rounds of target workers that carry a draft run ahead and yield the tokens of plain decoding, despite any loss."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from replicas import long_requests, replicas, stream_all
from serving import RecordingDraft, RecordingTarget, Serving, make_request, serving
from test_rounds_ahead import Unreliable

from specpool.testing import FakeOwnDraft
from specpool.v1 import generation_pb2 as pb
from specpool.v1 import target_worker_pb2

PASS_SECONDS, STEP_SECONDS = 0.01, 0.001


def timed_draft(acceptance: float = 0.9, step_seconds: float = STEP_SECONDS) -> FakeOwnDraft:
    return FakeOwnDraft(acceptance, pass_seconds=lambda rows: step_seconds)


def timed_target(draft: FakeOwnDraft | None = None) -> RecordingTarget:
    """A target whose verifications take the same time for any number of rows."""
    return RecordingTarget(draft=draft or timed_draft(), pass_seconds=lambda rows: PASS_SECONDS)


def items_of(target: RecordingTarget) -> list[target_worker_pb2.VerifyItem]:
    return [item for request in target.requests for item in request.items]


async def drafted_by(served: Serving, requests: int = 1, max_tokens: int = 150) -> tuple[int, int]:
    """Decode requests one by one. Return the numbers of draft tokens of the model, and of rounds."""
    before = (await served.info()).counters
    for _ in range(requests):
        await served.expect(make_request([7, requests], max_tokens))
    after = (await served.until_idle()).counters
    drafted = after.drafts["model"].draft_tokens - before.drafts["model"].draft_tokens
    return drafted, after.rounds - before.rounds


@pytest.mark.parametrize(("k", "is_recurrent"), [(0, False), (1, False), (2, False), (4, False), (4, True), (8, False)])
async def test_rounds_run_ahead_while_the_target_drafts(k: int, is_recurrent: bool) -> None:
    draft = FakeOwnDraft(0.7, is_recurrent=is_recurrent)
    target = RecordingTarget(draft=draft, is_recurrent=is_recurrent)
    async with serving(target, with_draft=False) as served:
        await asyncio.gather(*(served.expect(make_request([i, 1], 60, k=k)) for i in range(4)))
        counters = (await served.until_idle()).counters
    items = items_of(target)
    continued = [item for item in items if item.HasField("after_round_id")]
    assert len(continued) > len(items) / 2
    assert counters.completion_tokens == 240
    assert counters.cache_misses == target.missing_states == draft.missing_states == 0
    asked = [item for item in continued if item.HasField("own_draft")]
    if not k:
        assert not asked
    else:
        assert len(asked) > len(continued) / 2
        expected = sum(0.7**i for i in range(1, k + 1)) / k
        assert counters.accepted_draft_tokens / counters.draft_tokens == pytest.approx(expected, abs=0.15)
        assert counters.drafts["model"].draft_tokens == counters.draft_tokens


@pytest.mark.parametrize("policy", ["ragged", "exspec", "eqspec"])
@pytest.mark.parametrize("method", [None, pb.DRAFT_METHOD_NGRAM, pb.DRAFT_METHOD_BEST])
async def test_every_policy_and_method_gives_the_same_tokens(policy: str, method: Any) -> None:
    target = RecordingTarget(eos_rate=0.01, draft=FakeOwnDraft(0.5))
    async with serving(target, with_draft=False, policy=policy) as served:
        prompts = [[i, *[3, 4, 5] * 5] for i in range(6)]
        requests = [make_request(prompt, 40, k=None if i % 2 else 3, method=method) for i, prompt in enumerate(prompts)]
        await asyncio.gather(*map(served.expect, requests))
        await served.until_idle()


async def test_samples_of_one_request_equal_plain_decoding() -> None:
    target = RecordingTarget(draft=FakeOwnDraft(0.7))
    async with serving(target, with_draft=False) as served:
        request = make_request([1, 2, 3], 40, k=4, n=3, temperature=1.0)
        samples = [message async for message in served.stub.GenerateStream(request)]
        complete = [message.complete for message in samples if message.WhichOneof("response") == "complete"]
        await served.until_idle()
    expected = target.continuation([1, 2, 3], 40)
    assert [list(sample.token_ids) for sample in complete] == [expected] * 3


async def test_long_prompts_and_new_requests_share_rounds() -> None:
    target = timed_target()
    async with serving(target, with_draft=False, prefill_tokens=32) as served:
        first = asyncio.ensure_future(served.expect(make_request([1], 60, k=3)))
        await served.until(lambda info: info.counters.rounds > 3)
        await asyncio.gather(first, *(served.expect(make_request([i] * 90, 20, k=3)) for i in range(3)))
        await served.until_idle()
    chunks = [item for item in items_of(target) if item.prefill_only]
    assert chunks
    assert all(item.own_draft.num_draft_tokens == 3 and not item.own_draft.max_verified for item in chunks)


async def generate_until(served: Serving, is_expected: Callable[[int, int], bool]) -> None:
    """Generate answers until the numbers of draft tokens and rounds of one of them are as expected."""
    async with asyncio.timeout(120):
        while not is_expected(*await drafted_by(served, 1)):
            pass


@pytest.mark.slow
async def test_adaptive_lengths_follow_the_acceptance() -> None:
    draft = timed_draft(0.9)
    async with serving(timed_target(draft), with_draft=False, num_speculative_tokens=None) as served:
        await generate_until(served, lambda _, rounds: rounds < 150 / 2)  # drafts pay
        draft.acceptance = 0.0
        await generate_until(served, lambda drafted, _: drafted < 150 / 4)  # they no longer do


@pytest.mark.slow
async def test_a_slow_draft_runs_only_in_trials_until_it_becomes_faster() -> None:
    draft = timed_draft(step_seconds=4 * PASS_SECONDS)
    async with serving(timed_target(draft), with_draft=False, num_speculative_tokens=None) as served:
        await drafted_by(served, 2)
        await generate_until(served, lambda drafted, _: drafted < 150 / 10)
        draft.pass_seconds = lambda rows: STEP_SECONDS
        await generate_until(served, lambda drafted, _: drafted >= 100)


@pytest.mark.parametrize("fault", ["forget", "refuse", "unavailable", "wrong round"])
async def test_faults_cost_no_token(fault: str) -> None:
    target = Unreliable(0.1, (fault,), draft=FakeOwnDraft(0.8))
    async with serving(target, with_draft=False) as served:
        await asyncio.gather(*(served.expect(make_request([i, 3, 4], 60, k=4)) for i in range(6)))
        counters = (await served.until_idle()).counters
    assert counters.accepted_draft_tokens > 60


@pytest.mark.parametrize("knobs", [{"forget_every": 7}, {"slots": 2}, {"slots": 1, "forget_every": 3}])
async def test_lost_draft_caches_and_missing_slots_cost_no_token(knobs: dict[str, int]) -> None:
    draft = FakeOwnDraft(0.8, slots=knobs.get("slots", 16))
    draft.forget_every = knobs.get("forget_every", 0)
    target = RecordingTarget(draft=draft)
    async with serving(target, with_draft=False) as served:
        await asyncio.gather(*(served.expect(make_request([i, 3, 4], 60, k=4)) for i in range(6)))
        counters = (await served.until_idle()).counters
    assert counters.accepted_draft_tokens > 30
    assert not draft.caches


async def test_a_restarted_target_drafts_again() -> None:
    target = timed_target()
    async with serving(target, with_draft=False) as served:
        running = [asyncio.ensure_future(served.expect(make_request([i, 9], 80, k=3))) for i in range(3)]
        await served.until(lambda info: info.counters.rounds > 5)
        await target.stop()
        accepted = (await served.info()).counters.accepted_draft_tokens
        await target.start(served.target_address)
        await asyncio.gather(*running)
        counters = (await served.until_idle()).counters
    assert counters.accepted_draft_tokens > accepted


async def test_cancelled_requests_leave_nothing_behind() -> None:
    target = timed_target()
    async with serving(target, with_draft=False) as served:
        calls = [served.stub.Generate(make_request([i, 5], 2000, k=4)) for i in range(6)]
        running = asyncio.ensure_future(served.expect(make_request([6, 6], 60, k=4)))
        await served.until(lambda info: info.running == 7 and info.counters.rounds > 5)
        for call in calls:
            call.cancel()
        await running
        await served.until_idle()


async def test_the_other_target_drafts_for_sequences_of_a_lost_target() -> None:
    targets = [timed_target(), timed_target()]
    async with replicas(targets[1], first=targets[0]) as served:
        streams = asyncio.ensure_future(stream_all(served, long_requests(8)))
        await served.until(lambda info: info.running == 8 and info.counters.rounds > 20)
        await targets[0].stop()
        seen = len(targets[1].requests)
        await streams
        states = {worker.address: worker.state for worker in (await served.info()).draft_workers}
    later = [item for request in targets[1].requests[seen:] for item in request.items]
    assert any(item.own_draft.num_draft_tokens for item in later)
    assert sorted(states.values()) != ["ready", "ready"]


async def test_a_carried_draft_replaces_the_draft_worker(caplog: pytest.LogCaptureFixture) -> None:
    target = RecordingTarget(draft=FakeOwnDraft())
    draft = RecordingDraft(target)
    async with serving(target, draft) as served:
        await served.expect(make_request([1, 2], 40, k=4))
        info = await served.until_idle()
    assert not draft.requests
    assert info.counters.draft_tokens
    assert caplog.text.count("not using the draft workers") == 1


async def test_draft_workers_of_a_target_without_a_draft_are_shown_beside_carried_drafts() -> None:
    carrying, plain = timed_target(), RecordingTarget(pass_seconds=lambda rows: PASS_SECONDS)
    draft = RecordingDraft(plain)
    async with replicas(plain, first=carrying, draft=draft) as served:
        await asyncio.gather(*(served.expect(make_request([i, 9], 60, k=3)) for i in range(8)))
        info = await served.until_idle()
    assert draft.requests
    assert not any(item.HasField("own_draft") for item in items_of(plain))
    assert [worker.address for worker in info.draft_workers] == [served.target_address, served.draft_address]


async def test_the_status_shows_the_carried_draft() -> None:
    target = RecordingTarget(draft=FakeOwnDraft())
    async with serving(target, with_draft=False) as served:
        info = await served.info()
        model = await served.stub.GetModelInfo(pb.GetModelInfoRequest())
    assert [worker.address for worker in info.draft_workers] == [info.target.address]
    assert (info.draft.state, info.draft.model.model) == ("ready", "carried")
    assert info.draft.load.slots_total == 16
    assert model.draft.model == "carried"


async def test_a_carried_draft_with_another_tokenizer_is_refused_by_name() -> None:
    other = RecordingTarget(draft=FakeOwnDraft(fingerprint="another"))
    async with replicas(other, first=RecordingTarget(draft=FakeOwnDraft())) as served:
        states = {target.state: target.reason for target in (await served.info()).targets}
    differ = "the draft carried uses a different tokenizer than the target fake"
    assert states == {"ready": "", "refused": f"{differ}; run it in a draft worker, which translates tokens"}
