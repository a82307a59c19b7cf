"""Both workers busy at a time: two groups in turns, and drafting ahead, with the tokens of plain decoding."""

import asyncio
from typing import Any

import pytest
from serving import RecordingDraft, RecordingTarget, make_request, serving
from specpool.v1 import draft_worker_pb2, target_worker_pb2


class BusyTarget(RecordingTarget):
    """Takes its time for every token."""

    def __init__(self, seconds: float, **knobs: Any) -> None:
        super().__init__(**knobs)
        self.seconds, self.busy, self.rows = seconds, 0, 0

    async def Verify(self, request: target_worker_pb2.VerifyRequest, context: Any) -> target_worker_pb2.VerifyResponse:
        self.rows = sum(1 + len(item.draft_token_ids) for item in request.items)
        return await super().Verify(request, context)

    async def _begin_round(self, context: Any) -> None:
        self.busy += 1
        await asyncio.sleep(self.seconds * self.rows)
        self.busy -= 1
        await super()._begin_round(context)


class BusyDraft(RecordingDraft):
    """Notes how often it was called while the target was busy."""

    def __init__(self, target: BusyTarget, seconds: float, **knobs: Any) -> None:
        super().__init__(target, **knobs)
        self.target, self.seconds, self.beside, self.tokens = target, seconds, 0, 0

    async def Propose(self, request: draft_worker_pb2.ProposeRequest, context: Any) -> draft_worker_pb2.ProposeResponse:
        self.beside += self.target.busy
        self.tokens = sum(item.num_draft_tokens for item in request.items)
        return await super().Propose(request, context)

    async def _begin_round(self, context: Any) -> None:
        await asyncio.sleep(self.seconds * self.tokens)
        await super()._begin_round(context)


@pytest.mark.parametrize("overlap", ["on", "off"])
@pytest.mark.parametrize("sequences", [1, 8])
async def test_both_workers_are_busy_at_a_time_only_if_they_may(sequences: int, overlap: str) -> None:
    target = BusyTarget(seconds=0.0008)
    draft = BusyDraft(target, seconds=0.0006 if sequences > 1 else 0.0001, acceptance=0.95)
    async with serving(target, draft, overlap=overlap) as served:
        requests = [make_request((i, 1, 2), max_tokens=60, k=3) for i in range(sequences)]
        await asyncio.gather(*(served.expect(request) for request in requests))
        await served.until_idle()
    assert (draft.beside > 5) is (overlap == "on")


async def test_workers_at_the_same_place_take_turns() -> None:
    target = BusyTarget(seconds=0.0008)
    draft = BusyDraft(target, seconds=0.0006)
    async with serving(target, draft) as served:
        await asyncio.gather(*(served.expect(make_request((i,), max_tokens=30, k=3)) for i in range(6)))
    assert draft.beside == 0


async def test_workers_of_two_devices_do_not() -> None:
    target = BusyTarget(seconds=0.0008, device="cuda:0")
    draft = BusyDraft(target, seconds=0.0006, device="cuda:1")
    async with serving(target, draft) as served:
        await asyncio.gather(*(served.expect(make_request((i,), max_tokens=60, k=3)) for i in range(6)))
    assert draft.beside > 0
