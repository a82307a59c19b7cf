"""Rounds that continue a sequence before the response to its last round."""

import asyncio
import contextlib
import time
from typing import Any

import grpc
import pytest
from worker_service import CACHE_MISS, OK, PATIENCE_SECONDS, STALE_ROUND, Worker, held, verify

from specpool.v1 import common_pb2
from specpool.v1 import target_worker_pb2 as pb

PROMPT = [5, 6, 7, 8]


def after(
    round_id: int, draft_token_ids: list[int] | None = None, sequence_id: int = 1, **fields: Any
) -> pb.VerifyItem:
    """Continue after the sequence's result in this round."""
    return pb.VerifyItem(
        sequence_id=sequence_id, after_round_id=round_id, draft_token_ids=draft_token_ids or [], **fields
    )


async def test_rounds_sent_ahead_give_the_tokens_of_plain_decoding(target: Worker) -> None:
    truth = target.continuation(PROMPT, 8)
    stream = target.open_stream()
    await stream.write(target.request(verify(1, 0, PROMPT), round_id=1))
    gained = []
    for round_id in range(2, 9):
        await stream.write(target.request(after(round_id - 1), round_id=round_id))
        (result,) = (await stream.read()).results
        gained += result.token_ids
    (result,) = (await stream.read()).results
    assert [*gained, *result.token_ids] == truth
    assert result.cached_length == len(PROMPT) + 7


async def test_a_continued_sequence_verifies_draft_tokens(target: Worker) -> None:
    truth = target.continuation(PROMPT, 6)
    await target.round(verify(1, 0, PROMPT), round_id=1)
    wrong = (truth[3] + 1) % 257
    (result,) = await target.round(after(1, [truth[1], truth[2], wrong]), round_id=2)
    assert (list(result.token_ids), result.cached_length) == (truth[1:4], len(PROMPT) + 3)
    (result,) = await target.round(after(2, [truth[4]]), round_id=3)
    assert list(result.token_ids) == truth[4:6]


async def test_a_repeated_round_continues_at_the_same_place(target: Worker) -> None:
    await target.round(verify(1, 0, PROMPT), round_id=1)
    first = await target.round(after(1, [9]), round_id=2)
    assert await target.round(after(1, [9]), round_id=2) == first
    assert await target.round(after(1), round_id=3) != first  # round 2 came in between
    (result,) = await target.round(after(2), round_id=4)
    assert result.status == OK


def branch(num_accepted: int, token_id: int, *draft_token_ids: int) -> common_pb2.Branch:
    return common_pb2.Branch(num_accepted=num_accepted, token_id=token_id, draft_token_ids=draft_token_ids)


async def test_the_worker_selects_the_branch_of_the_last_outcome(target: Worker) -> None:
    truth = target.continuation(PROMPT, 7)
    other = (truth[2] + 1) % 257
    await target.round(verify(1, 0, PROMPT), round_id=1)
    branches = [branch(0, other, 9), branch(1, truth[0], 9), branch(0, truth[0], truth[1], other)]
    (result,) = await target.round(after(1, branches=branches), round_id=2)
    assert (list(result.token_ids), result.cached_length) == (truth[1:3], len(PROMPT) + 2)
    branches = [branch(0, truth[2], 9), branch(1, truth[2], *truth[3:5])]
    for _ in range(2):  # a repeated round verifies the same branch
        (result,) = await target.round(after(2, branches=branches), round_id=3)
        assert (list(result.token_ids), result.cached_length) == (truth[3:6], len(PROMPT) + 5)
    (result,) = await target.round(after(3, branches=[branch(1, truth[5], 9)]), round_id=4)
    assert list(result.token_ids) == truth[6:7], "no draft tokens are verified without a matching branch"


@pytest.mark.parametrize(
    ("item", "error"),
    [
        (
            pb.VerifyItem(sequence_id=1, base_length=4, token_ids=[9], branches=[branch(0, 9, 5)]),
            r"branches: must be empty without after_round_id",
        ),
        (after(1, [5], branches=[branch(0, 9, 5)]), r"draft_token_ids: must be empty with branches"),
        (after(1, branches=[branch(0, i) for i in range(65)]), r"branches: 65 is more than the maximum of 64"),
        (after(1, branches=[branch(0, 9)] * 100_000), r"branches: 100000 is more than the maximum of 64"),
        (after(1, branches=[branch(0, 9, 5), branch(0, 9)]), r"branches: must have at most one branch per outcome"),
        (after(1, branches=[branch(0, 9, 999)]), r"branches\[0\].draft_token_ids: token id 999 must be below"),
        (
            after(1, branches=[branch(0, 9, *[5] * 1025)]),
            r"branches\[0\].draft_token_ids: 1025 is more than the maximum",
        ),
    ],
    ids=["explicit position", "drafts, too", "too many", "far too many", "same outcome", "unknown token", "too long"],
)
async def test_impossible_branches_are_refused(target: Worker, item: pb.VerifyItem, error: str) -> None:
    await target.round(verify(1, 0, PROMPT), round_id=1)
    with pytest.raises(grpc.aio.AioRpcError, match=rf"items\[0\]\.{error}"):
        await target.round(item, round_id=2)


async def test_only_the_last_round_can_be_continued(target: Worker) -> None:
    await target.round(verify(1, 0, PROMPT), round_id=1)
    await target.round(verify(2, 0, PROMPT, prefill_only=True), round_id=2)
    results = await target.round(
        after(2), after(2, sequence_id=2), after(1, sequence_id=3), round_id=3
    )  # another round, no token, unknown
    assert [result.status for result in results] == [CACHE_MISS] * 3
    assert [target.cached(1), target.cached(2)] == [len(PROMPT)] * 2
    (result,) = await target.round(after(1), round_id=4)
    assert result.status == OK
    (result,) = await target.round(after(0), round_id=2)
    assert result.status == STALE_ROUND


async def test_an_explicit_item_takes_back_a_round_ahead(target: Worker) -> None:
    """The coordinator may discard a round ahead and continue from the tokens that it committed."""
    truth = target.continuation(PROMPT, 3)
    await target.round(verify(1, 0, PROMPT), round_id=1)
    await target.round(after(1), round_id=2)
    (result,) = await target.round(verify(1, len(PROMPT), truth[:1]), round_id=3)
    assert list(result.token_ids) == truth[1:2]


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"base_length": 1}, "base_length"),
        ({"token_ids": [5]}, "token_ids"),
        ({"prefill_only": True}, "prefill_only"),
        ({"sampling": {"temperature": 1}}, "sampling"),
        ({"cache_namespace": b""}, "cache_namespace"),
    ],
)
async def test_fields_that_the_worker_fills_in_must_be_unset(target: Worker, fields: Any, name: str) -> None:
    with pytest.raises(grpc.aio.AioRpcError, match=rf"items\[0\].{name}: must be unset with after_round_id"):
        await target.round(after(1, **fields), round_id=2)


async def test_a_round_continues_an_earlier_one(target: Worker) -> None:
    with pytest.raises(grpc.aio.AioRpcError, match=r"items\[0\].after_round_id: 2 must be below 2, the round"):
        await target.round(after(2), round_id=2)


async def test_a_round_after_a_failed_one_is_not_served(target: Worker) -> None:
    """The error ends the stream. The sequence continues from its committed tokens."""
    truth = target.continuation(PROMPT, 2)
    await target.round(verify(1, 0, PROMPT), round_id=1)
    stream = target.open_stream()
    await stream.write(target.request(verify(1, len(PROMPT), [999]), round_id=2))
    with contextlib.suppress(asyncio.InvalidStateError):  # the error may arrive first
        await stream.write(target.request(after(1), round_id=3))
    for _ in range(2):
        with pytest.raises(grpc.aio.AioRpcError, match="token id 999"):
            await stream.read()
    (result,) = await target.round(verify(1, len(PROMPT), truth[:1]), round_id=4)
    assert list(result.token_ids) == truth[1:]


async def test_the_next_round_waits_at_the_worker(target: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    """While a pass runs, the worker has read the next request."""
    waiting, forward = [], target.engine.forward

    def watched(spans: Any) -> Any:
        for _ in range(1000):
            if waiting or target.host.waiting:
                break
            time.sleep(0.01)
        waiting.append(target.host.waiting)
        return forward(spans)

    stream = target.open_stream()
    await stream.write(target.request(verify(1, 0, PROMPT), round_id=1))
    await stream.read()
    monkeypatch.setattr(target.engine, "forward", watched)
    for round_id in (2, 3):
        await stream.write(target.request(after(round_id - 1), round_id=round_id))
    await stream.read()
    assert waiting[0] == 1
    stream.cancel()
    await asyncio.sleep(0)


async def test_a_round_that_may_join_shares_the_pass_of_the_waiting_one(target: Worker) -> None:
    truth = target.continuation([2, 9], 1)
    await target.round(verify(1, 0, PROMPT), round_id=1)
    stream = target.open_stream()
    with held(target) as hold:
        passes = target.engine.passes
        await stream.write(target.request(after(1), round_id=2))
        assert await asyncio.to_thread(hold.began.wait, PATIENCE_SECONDS)
        await stream.write(target.request(after(2), round_id=3))
        newcomer = target.request(verify(2, 0, [2, 9]), round_id=4)
        newcomer.may_join = True
        await stream.write(newcomer)
        async with asyncio.timeout(PATIENCE_SECONDS):
            while target.host.waiting < 2:  # noqa: ASYNC110 - the requests arrive over a connection
                await asyncio.sleep(0.01)
        hold.open.set()
        responses = [await stream.read() for _ in range(3)]
        assert target.engine.passes - passes == 2, "rounds 3 and 4 share a pass"
    assert [response.round_id for response in responses] == [2, 3, 4]
    assert {result.status for response in responses for result in response.results} == {OK}
    assert list(responses[2].results[0].token_ids) == truth


async def test_rounds_of_one_sequence_never_share_a_pass(target: Worker) -> None:
    """Even if the coordinator says that they may."""
    truth = target.continuation(PROMPT, 3)
    await target.round(verify(1, 0, PROMPT), round_id=1)
    stream = target.open_stream()
    for round_id in (2, 3):
        request = target.request(after(round_id - 1), round_id=round_id)
        request.may_join = True
        await stream.write(request)
    gained = [token for _ in range(2) for token in (await stream.read()).results[0].token_ids]
    assert gained == truth[1:]
