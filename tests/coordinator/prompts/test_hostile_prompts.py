"""Prompts that would take much time or memory fail quickly, while other clients are served."""

import asyncio
import time
from collections.abc import AsyncIterator
from functools import partial

import pytest
import pytest_asyncio
from grpc import StatusCode
from local_prompts import LocalLink
from serving import PATIENCE_SECONDS, RecordingTarget, Serving, make_request, refusal, serving, violated_fields
from template_target import TemplateTarget

from coordinator.prompts.frames import Kind
from coordinator.prompts.tokenizer_pool import TokenizerPool
from specpool.testing import VOCAB_SIZE
from specpool.v1 import generation_pb2 as pb

LONG = 131_072
HUGE_TEMPLATE = "{% for i in range(99999) %}{% for j in range(99999) %}xxxxxxxx{% endfor %}{% endfor %}"


@pytest_asyncio.fixture
async def served() -> AsyncIterator[Serving]:
    """A server for long prompts and large messages."""
    async with serving(
        RecordingTarget(max_model_len=LONG),
        with_draft=False,
        max_request_bytes=4 * 2**20,
        request_memory=2**30,
        prefill_tokens=LONG,
        new_pool=TokenizerPool,
    ) as serving_:
        yield serving_


def chat(*contents: str, role: str = "user", **fields: object) -> pb.GenerateRequest:
    messages = [pb.ChatMessage(role=role, content=content) for content in contents]
    return pb.GenerateRequest(chat=pb.ChatInput(messages=messages), **fields)


PREDICTION = "speculative.prediction.text"
HOSTILE = {
    "600,000 messages": (
        pb.GenerateRequest(chat=pb.ChatInput(messages=[pb.ChatMessage(role="u")] * 600_000)),
        "chat.messages",
        "has more than 1024 entries",
    ),
    "a million characters": (chat("x" * 1_000_000), "chat.messages", "has 1000000 bytes, more than 655355"),
    "many tokens": (chat("x" * 600_000), "chat.messages", "has more than 131071 tokens"),
    "a long text": (pb.GenerateRequest(text="é" * 1_000_000), "text", "has 2000000 bytes"),
    "four million ids": (make_request([1] * 4_000_000), "tokenized.input_ids", "4000000 tokens, more than 131071"),
    "a large prediction": (make_request(prediction="é" * 1_000_000), PREDICTION, "has 2000000 bytes"),
    "a long prediction": (make_request(prediction="x" * 600_000), PREDICTION, "more than 131071 tokens"),
    "a wrong id at the end": (make_request([1] * 100_000 + [VOCAB_SIZE]), "tokenized.input_ids", "257 must be below"),
}


async def test_prompts_that_cannot_fit_fail_while_others_are_served(served: Serving) -> None:
    for case, (request, field, limit) in HOSTILE.items():
        hostile = [asyncio.create_task(refusal(served.stub.Generate(request))) for _ in range(3)]
        slowest = 0.0
        while not all(call.done() for call in hostile):
            began = time.monotonic()
            await served.expect(make_request(max_tokens=2))
            slowest = max(slowest, time.monotonic() - began)
        for call in hostile:
            error = await call
            assert error.code() is StatusCode.INVALID_ARGUMENT, case
            assert violated_fields(error) == [field]
            assert limit in error.details()
        assert slowest < PATIENCE_SECONDS / 4
    assert all(len(item.token_ids) < 100 for round_ in served.target.requests for item in round_.items)


@pytest.mark.slow
async def test_prompts_at_the_limits_are_served(served: Serving) -> None:
    assert (await served.stub.Generate(chat(*["hi"] * 1024, role="r" * 64))).usage.prompt_tokens == 1024 * 69
    text = pb.GenerateRequest(text="x" * (LONG - 1))
    assert (await served.stub.Generate(text)).usage.prompt_tokens == LONG - 1
    await served.expect(make_request(prediction="x" * (LONG - 1)))
    request = make_request([7] * (LONG - 1), max_tokens=1)
    request.cache_salt, request.priority = "x" * 128, -(2**31)
    await served.expect(request)


async def test_a_hostile_template_fails_the_chat_while_others_are_served() -> None:
    async with serving(
        TemplateTarget(HUGE_TEMPLATE, max_model_len=LONG), with_draft=False, new_pool=TokenizerPool
    ) as served:
        calls = [asyncio.create_task(refusal(served.stub.Generate(chat("hi")))) for _ in range(3)]
        await asyncio.gather(*(served.expect(make_request()) for _ in range(8)))
        for error in await asyncio.gather(*calls):
            assert error.code() is StatusCode.INVALID_ARGUMENT
            assert violated_fields(error) == ["chat.messages"]
            assert "more than 655355 characters" in error.details()
            assert "Traceback" not in error.details()


async def test_full_queue_refuses_before_tokenization() -> None:
    asked: list[Kind] = []
    new_pool = partial(TokenizerPool, new_link=partial(LocalLink, asked))
    async with serving(with_draft=False, max_num_seqs=1, queue_size=1, new_pool=new_pool) as served:
        served.target.open.clear()
        calls = [served.stub.Generate(make_request(request_id=f"r{i}")) for i in range(2)]
        await served.until(lambda info: info.running == 1 and info.queued == 1)
        for request in (chat("hi"), pb.GenerateRequest(text="hi"), make_request()):
            error = await refusal(served.stub.Generate(request))
            assert error.code() is StatusCode.RESOURCE_EXHAUSTED
            assert error.details() == "the queue is full (1 samples wait)"
        error = await refusal(served.stub.Generate(chat("hi", request_id="r0")))
        assert error.code() is StatusCode.ALREADY_EXISTS
        assert {*asked} == {Kind.LOAD}
        served.target.open.set()
        for call in calls:
            assert (await call).finish_reason == "length"


async def test_other_fields_are_checked_before_tokenization() -> None:
    asked: list[Kind] = []
    new_pool = partial(TokenizerPool, new_link=partial(LocalLink, asked))
    async with serving(RecordingTarget(max_model_len=LONG), with_draft=False, new_pool=new_pool) as served:
        for params, field in (
            (pb.SamplingParams(max_tokens=LONG), "max_tokens"),
            (pb.SamplingParams(max_tokens=0), "max_tokens"),
            (pb.SamplingParams(stop_token_ids=[VOCAB_SIZE]), "stop_token_ids"),
            (pb.SamplingParams(logprobs=21), "logprobs"),
        ):
            error = await refusal(served.stub.Generate(chat("hi", sampling_params=params)))
            assert violated_fields(error) == [f"sampling_params.{field}"]
        assert {*asked} == {Kind.LOAD}
