"""The draft that a fake target carries follows the protocol."""

import asyncio
from typing import Any

import pytest

from specpool.testing import FakeOwnDraft, FakeTarget
from specpool.v1 import common_pb2, target_worker_pb2

OK, NO_SLOT = common_pb2.ITEM_STATUS_OK, common_pb2.ITEM_STATUS_NO_SLOT
PROMPT = [1, 2, 3, 4]


class Decoding:
    """Rounds of one sequence. Each continues the last one."""

    def __init__(self, target: FakeTarget, sequence_id: int = 1) -> None:
        self.target, self.sequence_id, self.round_id, self.tokens = target, sequence_id, 0, list(PROMPT)
        self.response: target_worker_pb2.VerifyResponse
        self.request: target_worker_pb2.VerifyRequest

    async def round(self, k: int = 4, next_k: int | None = None, **own: Any) -> target_worker_pb2.VerifyResult:
        """Verify at most `k` own draft tokens, and draft `next_k`, by default the same number."""
        item = target_worker_pb2.VerifyItem(sequence_id=self.sequence_id)
        if self.round_id:
            item.after_round_id = self.round_id
        else:
            item.token_ids[:] = PROMPT
            item.sampling.SetInParent()
        item.own_draft.max_verified, item.own_draft.num_draft_tokens = k, k if next_k is None else next_k
        item.own_draft.max_length = own.pop("max_length", 100)
        item.own_draft.MergeFrom(target_worker_pb2.OwnDraftItem(**own))
        self.round_id += 1
        self.request = target_worker_pb2.VerifyRequest(coordinator_id="c", round_id=self.round_id, items=[item])
        self.response = await self.target.Verify(self.request, None)
        (result,) = self.response.results
        self.tokens += result.token_ids
        assert self.tokens == [*PROMPT, *self.target.continuation(PROMPT, len(self.tokens) - len(PROMPT))]
        return result


async def test_a_round_verifies_the_draft_of_the_last_one() -> None:
    decoding = Decoding(FakeTarget(draft=FakeOwnDraft(1.0)))
    first = await decoding.round()
    assert (len(first.token_ids), list(first.own_draft.draft_token_ids)) == (1, [])
    assert list(decoding.response.draft_rows) == [5, 1, 1, 1]
    second = await decoding.round(k=3)
    assert (len(second.token_ids), second.own_draft.num_verified) == (4, 3)
    assert len(second.own_draft.draft_token_ids) == 4
    assert (second.own_draft.status, second.own_draft.cached_length) == (OK, len(decoding.tokens))
    assert decoding.response.draft_ns > 0


async def test_a_repeated_round_gets_the_same_answer() -> None:
    decoding = Decoding(FakeTarget(draft=FakeOwnDraft(0.5)))
    for _ in range(8):
        result = await decoding.round()
        again = await decoding.target.Verify(decoding.request, None)
        assert again.results[0] == result


async def test_a_plain_round_keeps_the_rest_of_a_right_draft() -> None:
    decoding = Decoding(FakeTarget(draft=FakeOwnDraft(1.0)))
    await decoding.round()
    plain = await decoding.round(k=0)
    assert (len(plain.token_ids), len(plain.own_draft.draft_token_ids)) == (1, 4)
    measured = await decoding.round(k=4, next_k=0)
    assert (len(measured.token_ids), measured.own_draft.num_verified) == (4, 3)
    assert not (await decoding.round()).own_draft.draft_token_ids


async def test_a_plain_round_drops_a_wrong_draft() -> None:
    decoding = Decoding(FakeTarget(draft=FakeOwnDraft(0.0)))
    await decoding.round()
    await decoding.round(k=0)
    assert not (await decoding.round()).own_draft.draft_token_ids


async def test_lengths_follow_the_request() -> None:
    decoding = Decoding(FakeTarget(draft=FakeOwnDraft(0.5)))
    await decoding.round(k=8, min_chance=0.2)
    unlikely = await decoding.round(k=8, min_chance=0.3)
    assert len(unlikely.own_draft.draft_token_ids) == 3
    assert unlikely.own_draft.num_verified == 1
    await decoding.round(k=8, max_length=len(decoding.tokens) + 4)
    ending = await decoding.round(k=8, max_length=len(decoding.tokens) + 1)
    assert ending.own_draft.num_verified == 1


async def test_faults_of_the_draft_cost_only_drafts() -> None:
    draft = FakeOwnDraft(1.0, slots=1)
    target = FakeTarget(draft=draft)
    first, second = Decoding(target), Decoding(target, 2)
    await first.round()
    assert (await second.round()).own_draft.status == NO_SLOT
    assert not (await second.round()).own_draft.draft_token_ids
    draft.forget()
    assert (await first.round()).own_draft.num_verified == 4
    assert (await first.round()).own_draft.status == OK
    await target.Release(common_pb2.ReleaseRequest(coordinator_id="c", all=True), None)
    assert not draft.caches


async def test_a_target_without_a_draft_rejects_own_draft_items() -> None:
    with pytest.raises(AssertionError, match="carries no draft"):
        await Decoding(FakeTarget()).round()


async def test_a_sequence_released_while_the_draft_runs_leaves_nothing() -> None:
    draft = FakeOwnDraft(1.0, pass_seconds=lambda rows: 0.01)
    target = FakeTarget(draft=draft)
    running = asyncio.create_task(Decoding(target).round())
    while not draft.busy:  # noqa: ASYNC110 - the fake has no event for it
        await asyncio.sleep(0)
    await target.Release(common_pb2.ReleaseRequest(coordinator_id="c", all=True), None)
    assert (await running).status == OK
    assert not draft.caches
