"""Both workers busy at a time: two groups in turns, and drafting ahead, with the tokens of plain decoding."""

import asyncio
from typing import Any

import pytest
from serving import RecordingDraft, RecordingTarget, make_request, serving

from specpool.v1 import draft_worker_pb2

MILLISECOND = 0.001


def busy_target(row: float = 0.8 * MILLISECOND, **knobs: Any) -> RecordingTarget:
    """Takes its time for every token."""
    return RecordingTarget(pass_seconds=lambda rows: row * rows, **knobs)


class WatchingDraft(RecordingDraft):
    """Counts the rounds that begin or end while the target is busy."""

    beside = 0

    async def Propose(self, request: draft_worker_pb2.ProposeRequest, context: Any) -> draft_worker_pb2.ProposeResponse:
        began_beside = self._target.busy
        response = await super().Propose(request, context)
        self.beside += began_beside or self._target.busy
        return response


def watching_draft(target: RecordingTarget, step: float = 0.6 * MILLISECOND, **knobs: Any) -> WatchingDraft:
    """Takes its time too."""
    return WatchingDraft(target, acceptance=0.95, pass_seconds=lambda rows: step * rows, **knobs)


async def generate(target: RecordingTarget, draft: WatchingDraft, sequences: int, **settings: Any) -> None:
    async with serving(target, draft, **settings) as served:
        requests = [make_request((i, 1, 2), max_tokens=60, k=3) for i in range(sequences)]
        await asyncio.gather(*(served.expect(request) for request in requests))
        await served.until_idle()


@pytest.mark.parametrize("overlap", ["on", "off"])
@pytest.mark.parametrize("sequences", [1, 8])
async def test_both_workers_are_busy_at_a_time_only_if_they_may(sequences: int, overlap: str) -> None:
    target = busy_target(0.8 * MILLISECOND if sequences > 1 else 8 * MILLISECOND)
    draft = watching_draft(target)
    await generate(target, draft, sequences, overlap=overlap)
    assert (draft.beside > 5) is (overlap == "on")


async def test_workers_at_the_same_place_take_turns() -> None:
    target = busy_target()
    draft = watching_draft(target)
    await generate(target, draft, 6)
    assert draft.beside == 0


async def test_workers_of_two_devices_do_not() -> None:
    target = busy_target(device="cuda:0")
    draft = watching_draft(target, device="cuda:1")
    await generate(target, draft, 6)
    assert draft.beside > 0


@pytest.mark.parametrize(("device", "overlaps"), [("cuda:1", False), ("cuda:2", True)])
async def test_a_draft_on_the_device_of_any_rank_takes_turns_with_the_target(device: str, overlaps: bool) -> None:
    target = busy_target(device="cuda:0", rank_devices=["cuda:0", "cuda:1 (NVIDIA H200)"])
    draft = watching_draft(target, device=device)
    await generate(target, draft, 6)
    assert (draft.beside > 0) is overlaps


async def test_nothing_overlaps_where_halves_cost_as_much_as_all() -> None:
    target = RecordingTarget(pass_seconds=lambda rows: 6 * MILLISECOND)
    draft = WatchingDraft(target, acceptance=0.5, pass_seconds=lambda rows: 8 * MILLISECOND)
    await generate(target, draft, 6, overlap="on")
    assert draft.beside == 0
