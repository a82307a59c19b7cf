"""Requests with a prediction: conversion to token ids, usage, and queue limits."""

import asyncio
import logging

import grpc
import pytest
from serving import RecordingTarget, Serving, make_request, refusal, serving
from tiny_tokenizers import BYTES

from specpool.v1 import generation_pb2 as pb


async def predictions(served: Serving, request: pb.GenerateRequest) -> list[tuple[int, ...]]:
    """Return the predictions of a request's sequences."""
    served.target.open.clear()
    call = asyncio.ensure_future(served.stub.Generate(request))
    await served.until(lambda info: info.running + info.queued)
    found = [sequence.request.prediction for sequence in served.process.coordinator.queue.in_flight]
    served.target.open.set()
    await call
    return found


async def test_texts_and_token_ids_reach_the_sequences() -> None:
    async with serving() as served:
        text = tuple(BYTES.encode("Grüße").ids)
        assert await predictions(served, make_request(prediction="Grüße")) == [text]
        token_ids = make_request(prediction=[5, 6, 7], method=pb.DRAFT_METHOD_PREDICTION)
        assert await predictions(served, token_ids) == [(5, 6, 7)]
        assert await predictions(served, make_request()) == [()]
        assert await predictions(served, make_request(prediction="Grüße", k=0)) == [()]  # plain decoding ignores it
        samples = await predictions(served, make_request(prediction="Grüße", n=3, temperature=1.0))
        assert samples == [text] * 3
        assert len(set(map(id, samples))) == 1


@pytest.mark.parametrize("method", ["model", "ngram", "suffix", "prediction", "best"])
async def test_usage_counts_the_tokens_of_the_prediction(method: str) -> None:
    async with serving(draft_method=method) as served:
        answer = served.target.continuation([9], 40)
        usage = (await served.expect(make_request([9], 40, prediction=answer))).usage
        assert usage.accepted_prediction_tokens > 20
        assert usage.rejected_prediction_tokens == 0
        edited = [token if place % 7 else (token + 1) % 256 for place, token in enumerate(answer)]
        usage = (await served.expect(make_request([9], 40, prediction=edited))).usage
        assert min(usage.accepted_prediction_tokens, usage.rejected_prediction_tokens) > 5
        usage = (await served.expect(make_request([9], 40))).usage
        assert (usage.accepted_prediction_tokens, usage.rejected_prediction_tokens) == (0, 0)


async def test_predictions_survive_a_lost_target_and_preemption() -> None:
    target = RecordingTarget(slots=2)
    async with serving(target, max_num_seqs=2, draft_method="prediction") as served:
        requests = [make_request([i], 200, prediction=target.continuation([i], 200)) for i in range(6)]
        calls = [asyncio.ensure_future(served.expect(request)) for request in requests]
        await served.until(lambda info: info.counters.completion_tokens > 50)
        await target.stop()
        await target.start(served.target_address)
        usages = [response.usage for response in await asyncio.gather(*calls)]
        assert all(usage.accepted_prediction_tokens > 100 for usage in usages)
        await served.until_idle()


async def test_logs_have_no_predictions(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    async with serving() as served:
        await served.expect(make_request(prediction="secret"))
        error = await refusal(served.stub.Generate(make_request(prediction="secret", method=pb.DRAFT_METHOD_NGRAM)))
        assert "secret" not in str(error.details())
    assert caplog.records
    assert "secret" not in caplog.text


async def test_predictions_count_towards_the_token_limit_of_the_queue() -> None:
    async with serving(max_num_seqs=1, queue_tokens=50) as served:
        served.target.open.clear()
        calls = [asyncio.ensure_future(served.stub.Generate(make_request()))]
        await served.until(lambda info: info.running == 1)
        calls.append(asyncio.ensure_future(served.stub.Generate(make_request(prediction=[1] * 80))))
        await served.until(lambda info: info.queued == 1)
        error = await refusal(served.stub.Generate(make_request(prediction=[1] * 20)))
        assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "83 tokens wait, of at most 50" in str(error.details())
        served.target.open.set()
        await asyncio.gather(*calls)
        await served.until_idle()
