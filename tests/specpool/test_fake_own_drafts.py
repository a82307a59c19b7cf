"""The draft that a fake target carries follows the protocol as the target worker's does."""

from typing import Any

from specpool.testing import FakeOwnDraft, FakeTarget
from specpool.v1 import common_pb2, target_worker_pb2

OK, MISS = common_pb2.ITEM_STATUS_OK, common_pb2.ITEM_STATUS_CACHE_MISS
PROMPT = [1, 2, 3]


def carrying(acceptance: float = 1.0, **knobs: Any) -> FakeTarget:
    return FakeTarget(draft=FakeOwnDraft(acceptance, **knobs))


async def verify(
    target: FakeTarget, round_id: int, verified: int, drafted: int, max_length: int = 100, **own: Any
) -> target_worker_pb2.VerifyResult:
    """Send the next round of a sequence, the first one with its prompt."""
    after = {"after_round_id": round_id - 1} if round_id > 1 else {"token_ids": PROMPT, "sampling": {}}
    fields = {"max_verified": verified, "num_draft_tokens": drafted, "max_length": max_length} | own
    item = target_worker_pb2.VerifyItem(sequence_id=1, own_draft=target_worker_pb2.OwnDraftItem(**fields), **after)
    request = target_worker_pb2.VerifyRequest(coordinator_id="c", round_id=round_id, items=[item])
    (result,) = (await target.Verify(request, None)).results
    return result


async def test_a_round_verifies_the_draft_of_the_last_one() -> None:
    target = carrying()
    truth = target.continuation(PROMPT, 20)
    first = await verify(target, 1, verified=4, drafted=4)
    assert ([*first.token_ids], [*first.own_draft.draft_token_ids]) == (truth[:1], [])
    assert (first.own_draft.status, first.own_draft.cached_length) == (OK, 4), "it has run the token that was gained"
    second = await verify(target, 2, verified=3, drafted=4)
    assert [*second.token_ids] == truth[1:5]
    assert ([*second.own_draft.draft_token_ids], second.own_draft.num_verified) == (truth[1:5], 3)


async def test_a_repeated_round_has_the_same_answer() -> None:
    target = carrying(acceptance=0.5)
    for round_id in range(1, 9):
        answer = await verify(target, round_id, verified=4, drafted=4)
        assert await verify(target, round_id, verified=4, drafted=4) == answer
    assert (await verify(target, 7, verified=4, drafted=4)).status == MISS, "a later round has begun"


async def test_what_is_left_of_a_draft_stays_if_the_round_drafts_nothing() -> None:
    target = carrying()
    truth = target.continuation(PROMPT, 9)
    await verify(target, 1, verified=0, drafted=4)
    plain = await verify(target, 2, verified=0, drafted=0)
    assert ([*plain.token_ids], plain.own_draft.num_verified) == (truth[1:2], 0)
    third = await verify(target, 3, verified=4, drafted=0)
    assert ([*third.token_ids], [*third.own_draft.draft_token_ids]) == (truth[2:6], truth[2:5])


async def test_own_drafts_end_at_the_maximum_length_and_where_they_are_unlikely() -> None:
    target = carrying(acceptance=0.9)
    await verify(target, 1, verified=0, drafted=4, max_length=6, min_chance=0.1)
    second = await verify(target, 2, verified=4, drafted=4, max_length=6, min_chance=0.85)
    assert (len(second.own_draft.draft_token_ids), second.own_draft.num_verified) == (2, 1)


async def test_faults_of_the_draft_cost_only_drafts() -> None:
    target = carrying(slots=0)
    truth = target.continuation(PROMPT, 2)
    results = [await verify(target, round_id, verified=4, drafted=4) for round_id in (1, 2)]
    assert [[*result.token_ids] for result in results] == [truth[:1], truth[1:]]
    assert {result.own_draft.status for result in results} == {common_pb2.ITEM_STATUS_NO_SLOT}
    forgetful = carrying()
    assert forgetful.draft is not None
    forgetful.draft.forget_every = 2
    statuses = [(await verify(forgetful, number, verified=4, drafted=4)).own_draft.status for number in range(1, 5)]
    assert statuses == [OK, MISS, OK, MISS]
