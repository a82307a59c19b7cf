"""A coordinator with a second draft model: shares, exact tokens while drafts change, and faulty canaries."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from mixes import branches_only
from replicas import replicas
from serving import PATIENCE_SECONDS, RecordingDraft, RecordingTarget, Serving, make_request, serving

from coordinator.workers import draft_calls
from specpool.v1 import generation_pb2 as pb

PASS_SECONDS = 0.002


def passes(rows: int) -> float:
    return PASS_SECONDS * (1 + rows / 64)


@pytest.fixture
def _patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let rounds wait for all drafts. On a busy machine, any of them may be late."""
    monkeypatch.setattr(draft_calls, "MIN_PATIENCE_SECONDS", PATIENCE_SECONDS)
    for name in ("MAX_SLOWDOWN_AHEAD", "WAIT_SHARE"):
        monkeypatch.setattr(draft_calls, name, 1e6)


patient = pytest.mark.usefixtures("_patience")


@asynccontextmanager
async def serving_canary(
    current: float = 0.8, new: float = 0.8, canary: type[RecordingDraft] = RecordingDraft, **settings: Any
) -> AsyncIterator[tuple[Serving, RecordingDraft, RecordingDraft]]:
    """Run a coordinator with the drafts "current" and "new". `current` and `new`: their acceptance rates."""
    target = RecordingTarget(pass_seconds=passes)
    drafts = RecordingDraft(target, acceptance=current, weights="one"), canary(target, acceptance=new, weights="two")
    for draft in drafts:
        draft.model = "draft"
    async with serving(target, drafts[0], others=drafts[1:], labels=("current", "new"), **settings) as served:
        yield served, *drafts


async def generate(served: Serving, count: int, max_tokens: int = 48) -> list[pb.GenerateResponse]:
    """Generate, and compare all tokens with plain decoding."""
    asked = [make_request([i % 50, 2, 3 + i], max_tokens, ignore_eos=True) for i in range(count)]
    return await asyncio.gather(*map(served.expect, asked))


async def drafts_of(served: Serving) -> dict[str, pb.DraftModelState]:
    return {draft.name: draft for draft in (await served.info()).drafts}


def seen(draft: RecordingDraft) -> set[int]:
    return {item.sequence_id for request in draft.requests for item in request.items}


@patient
@pytest.mark.parametrize("overlap", ["off", "on"])
async def test_fixed_shares(overlap: str) -> None:
    async with serving_canary(draft_share="new=0.25", overlap=overlap) as (served, current, new):
        await generate(served, 24)
        assert (len(seen(current)), len(seen(new))) == (18, 6)
        assert not seen(current) & seen(new)
        info = await served.until_idle()
        assert [worker.draft for worker in info.draft_workers] == ["current", "new"]
        drafts = await drafts_of(served)
        assert [(d.share, d.weights_fingerprint, d.ready_workers) for d in drafts.values()] == [
            (0.75, "one", 1), (0.25, "two", 1)
        ]  # fmt: skip
        counters = info.counters
        assert sum(draft.draft_tokens for draft in drafts.values()) == counters.draft_tokens
        assert sum(draft.accepted_draft_tokens for draft in drafts.values()) == counters.accepted_draft_tokens
        assert sum(draft.completion_tokens for draft in drafts.values()) == counters.completion_tokens
        assert drafts["current"].running == 0


@patient
async def test_shares_hold_for_each_target() -> None:
    first, second = (RecordingTarget(pass_seconds=passes) for _ in range(2))
    current, new = (RecordingDraft(first, acceptance=0.8, weights=weights) for weights in ("one", "two"))
    drafts: dict[str, Any] = {"draft": current, "others": [new], "labels": ("current", "new")}
    async with replicas(second, first=first, draft_share="new=0.25", **drafts) as served:
        await generate(served, 32)
        for lane in served.process.coordinator.lanes:
            assert lane.draft is not None
            one, two = lane.draft.roster.known_models
            assert one.rounds > two.rounds > 0
        states = await drafts_of(served)
        assert [(draft.name, draft.share) for draft in states.values()] == [("current", 0.75), ("new", 0.25)]
        assert sum(draft.completion_tokens for draft in states.values()) == 32 * 48


async def test_a_withdrawn_draft_gets_no_sequences() -> None:
    async with serving_canary(draft_share="new=0") as (served, current, new):
        await generate(served, 8)
        assert (len(seen(current)), len(seen(new))) == (8, 0)
        assert [worker.state for worker in (await served.info()).draft_workers] == ["ready", "ready"]


@patient
async def test_sequences_of_a_canary_that_dies_continue_with_the_other_draft() -> None:
    async with serving_canary(draft_share="new=0.5") as (served, current, new):
        running = asyncio.create_task(generate(served, 8, 400))
        while len(new.requests) < 10:  # noqa: ASYNC110 - polls a fake worker
            await asyncio.sleep(0.005)
        moved = seen(new)
        await new.stop()
        await running
        assert moved <= seen(current)
        drafts = await drafts_of(served)
        assert (drafts["new"].ready_workers, drafts["new"].share) == (0, 0)


class WithoutBranches(RecordingDraft):
    """A draft that cannot draft during a verification, like one with another tokenizer."""

    def __init__(self, target: RecordingTarget, **knobs: Any) -> None:
        super().__init__(target, max_branches=0, **knobs)


@patient
async def test_a_canary_without_branches_takes_none_from_the_current_draft() -> None:
    """It sometimes drafts before the verification."""
    async with serving_canary(canary=WithoutBranches, draft_share="new=0.25", overlap="on") as (served, current, new):
        with branches_only():
            await generate(served, 16, 200)
        drafts = await drafts_of(served)
    assert any(item.num_branches for request in current.requests for item in request.items)
    assert not any(item.num_branches for request in new.requests for item in request.items)
    assert drafts["current"].accepted_draft_tokens > drafts["new"].accepted_draft_tokens > 0


class Hanging(RecordingDraft):
    """Never answers."""

    async def Propose(self, request: Any, context: Any) -> Any:
        self.requests.append(request)
        await asyncio.Event().wait()


async def test_rounds_do_not_wait_for_a_canary_that_hangs() -> None:
    settings = {"draft_share": "new=0.25", "draft_timeout_seconds": 2.0 * PATIENCE_SECONDS}
    async with serving_canary(canary=Hanging, **settings) as (served, _, new):
        await generate(served, 8)
        assert seen(new)


@patient
@pytest.mark.parametrize(("current", "new"), [(0.9, 0.1), (0.1, 0.9)])
async def test_the_better_draft_gains_share(current: float, new: float) -> None:
    async with serving_canary(current, new) as (served, *_):
        better, worse = ("current", "new") if current > new else ("new", "current")
        for _ in range(20):
            await generate(served, 16, 96)
            drafts = await drafts_of(served)
            if drafts[better].share > 0.9:
                break
        assert drafts[better].share > 0.9 > drafts[worse].share > 0
        assert drafts[better].expected_tokens_per_s > drafts[worse].expected_tokens_per_s


@patient
async def test_a_canary_with_changed_weights_is_another_draft() -> None:
    async with serving_canary(draft_share="new=0.5") as (served, _, new):
        await generate(served, 4)
        await served.until_idle()
        before = await drafts_of(served)
        address = served.draft_address.split(",")[1].partition("=")[2] if served.draft_address else ""
        await new.stop()
        new.weights = "0123456789"
        await new.start(address)
        while len(await drafts_of(served)) < 3:
            await generate(served, 2)  # an idle link may not notice the restart
        await served.until(lambda info: info.drafts[2].ready_workers)
        drafts = await drafts_of(served)
        assert [draft.weights_fingerprint for draft in drafts.values()] == ["one", "two", "0123456789"]
        assert drafts["new"].weights_fingerprint == "0123456789"
        assert drafts["new (two)"].draft_tokens == before["new"].draft_tokens > 0
        await generate(served, 4)
