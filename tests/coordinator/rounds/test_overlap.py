"""Overlap: two alternating groups, and drafting ahead, with the tokens of plain decoding."""

import asyncio
from typing import Any

import pytest
from mixes import branches_only
from serving import RecordingDraft, RecordingTarget, make_request, serving

from specpool.v1 import draft_worker_pb2

MILLISECOND = 0.001


def busy_target(row: float = 0.8 * MILLISECOND, **knobs: Any) -> RecordingTarget:
    """A target with a cost per row."""
    return RecordingTarget(pass_seconds=lambda rows: row * rows, **knobs)


class WatchingDraft(RecordingDraft):
    """Counts calls that begin or end while the target is busy."""

    def __init__(self, target: RecordingTarget, **knobs: Any) -> None:
        super().__init__(target, **knobs)
        self._watched, self.beside = target, 0

    async def Propose(self, request: draft_worker_pb2.ProposeRequest, context: Any) -> draft_worker_pb2.ProposeResponse:
        began_beside = self._watched.busy
        response = await super().Propose(request, context)
        self.beside += began_beside or self._watched.busy
        return response


def watching_draft(target: RecordingTarget, step: float = 0.6 * MILLISECOND, **knobs: Any) -> WatchingDraft:
    """A draft with a cost per step."""
    return WatchingDraft(target, acceptance=0.95, pass_seconds=lambda rows: step * rows, **knobs)


async def generate(target: RecordingTarget, draft: WatchingDraft, sequences: int, **settings: Any) -> None:
    async with serving(target, draft, **settings) as served:
        requests = [make_request((i, 1, 2), max_tokens=60, k=3) for i in range(sequences)]
        await asyncio.gather(*(served.expect(request) for request in requests))
        await served.until_idle()


@pytest.mark.parametrize(("sequences", "overlap"), [(1, "on"), (8, "on"), (8, "off")])
async def test_workers_overlap_only_if_the_settings_allow_it(sequences: int, overlap: str) -> None:
    is_single = sequences == 1  # overlaps only with branches, which pay off if passes are slow
    target = busy_target(8 * MILLISECOND if is_single else 0.8 * MILLISECOND)
    draft = watching_draft(target, 4 * MILLISECOND if is_single else 0.6 * MILLISECOND)
    await generate(target, draft, sequences, overlap=overlap)
    assert (draft.beside > 5) is (overlap == "on")


@pytest.mark.parametrize(
    ("device", "ranks", "overlaps"),
    [
        ("cpu", [], False),
        ("cuda:1", ["cuda:0", "cuda:1 (NVIDIA H200)"], False),
        ("cuda:2", ["cuda:0", "cuda:1 (NVIDIA H200)"], True),
    ],
)
async def test_workers_overlap_only_on_separate_devices(device: str, ranks: list[str], overlaps: bool) -> None:
    target = busy_target(device="cpu" if device == "cpu" else "cuda:0", rank_devices=ranks)
    draft = watching_draft(target, device=device)
    await generate(target, draft, 6)
    assert (draft.beside > 0) is overlaps


async def test_no_overlap_if_halves_take_as_long_as_the_whole_group() -> None:
    target = RecordingTarget(pass_seconds=lambda rows: 6 * MILLISECOND)
    draft = WatchingDraft(target, acceptance=0.5, pass_seconds=lambda rows: 8 * MILLISECOND, max_branches=0)
    await generate(target, draft, 6, overlap="on")
    assert draft.beside == 0


class LateDraft(RecordingDraft):
    """Answers calls for branches only once it is told to."""

    def __init__(self, target: RecordingTarget, **knobs: Any) -> None:
        super().__init__(target, **knobs)
        self.may_answer, self.waiting = asyncio.Event(), 0

    async def Propose(self, request: draft_worker_pb2.ProposeRequest, context: Any) -> draft_worker_pb2.ProposeResponse:
        if any(item.num_branches for item in request.items):
            self.waiting += 1
            await self.may_answer.wait()
        return await super().Propose(request, context)


async def test_no_request_waits_for_late_branches() -> None:
    target = busy_target()
    draft = LateDraft(target)
    with branches_only():
        async with serving(target, draft, overlap="on") as served:
            await served.expect(make_request((1, 2), max_tokens=20, k=3))
            assert draft.waiting, "the first call is still open"
            draft.may_answer.set()
            await served.expect(make_request((3, 4), max_tokens=20, k=3))
            await served.until_idle()


async def test_branches_are_used_and_a_draft_that_cannot_draft_them_is_not_asked() -> None:
    target = busy_target()
    for max_branches in (64, 0):
        draft = RecordingDraft(target, acceptance=1.0, max_branches=max_branches)
        with branches_only():
            async with serving(target, draft, overlap="on") as served:
                response = await served.stub.Generate(make_request((1, 2), max_tokens=20, k=3))
                assert list(response.token_ids) == target.continuation([1, 2], 20)
                assert response.speculative_decoding.draft_acceptance_rate == 1
                asked = [item.num_branches for request in draft.requests for item in request.items]
                assert any(asked) == (max_branches > 0)
