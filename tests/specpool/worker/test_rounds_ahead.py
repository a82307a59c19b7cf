"""Rounds that continue a sequence before the response to its last round."""

import asyncio
import time
from typing import Any

import grpc
import pytest
from worker_service import CACHE_MISS, OK, STALE_ROUND, Worker, verify

from specpool.v1 import target_worker_pb2 as pb

PROMPT = [5, 6, 7, 8]


def after(round_id: int, draft_token_ids: list[int] | None = None, sequence_id: int = 1, **fields: Any) -> pb.VerifyItem:
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


async def test_a_released_sequence_is_a_cache_miss(target: Worker) -> None:
    await target.round(verify(1, 0, PROMPT), round_id=1)
    await target.release(1)
    (result,) = await target.round(after(1), round_id=2)
    assert result.status == CACHE_MISS


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
        ({"prefix_sequence_id": 3}, "prefix_sequence_id"),
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
    await stream.write(target.request(after(1), round_id=3))
    with pytest.raises(grpc.aio.AioRpcError, match="token id 999"):
        while True:
            await stream.read()
    (result,) = await target.round(verify(1, len(PROMPT), truth[:1]), round_id=4)
    assert list(result.token_ids) == truth[1:]


async def test_workers_report_rounds_ahead(worker: Worker) -> None:
    response = await worker.info()
    assert (response.load.max_rounds_ahead > 0) == hasattr(worker.stub, "Verify")


async def test_the_next_round_waits_at_the_worker(target: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    """While a pass runs, the worker has read the next request."""
    waiting, forward = [], target.engine.forward

    def watched(spans: Any) -> Any:
        for _ in range(1000):
            if target.host.waiting:
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
