"""Invalid requests fail with the field and its limit, and the server goes on serving."""

import math
from collections.abc import AsyncIterator
from itertools import product
from typing import Any

import grpc
import pytest
import pytest_asyncio
from grpc import StatusCode
from serving import RecordingTarget, Serving, make_request, refusal, serving, stream, violated_fields
from template_target import TemplateTarget

from coordinator.requests import validation
from specpool.protocol.sampling import RANGES
from specpool.testing import VOCAB_SIZE
from specpool.v1 import generation_pb2 as pb

MAX_MODEL_LEN = 100
SERVICE = "specpool.v1.GenerationService"


@pytest_asyncio.fixture
async def served() -> AsyncIterator[Serving]:
    """A server with small limits, which must work after each test."""
    limits = {"max_num_speculative_tokens": 6, "max_request_bytes": 4096}
    async with serving(RecordingTarget(max_model_len=MAX_MODEL_LEN), with_draft=False, **limits) as serving_:
        yield serving_
        await serving_.expect(make_request())
        info = await serving_.until_idle()
        assert "error" not in info.counters.finished


async def both_refusals(served: Serving, request: pb.GenerateRequest) -> grpc.aio.AioRpcError:
    """The error of a request, which is the same for both calls."""
    unary, streaming = await refusal(served.stub.Generate(request)), await refusal(stream(served, request))
    assert unary.code() is streaming.code()
    assert unary.details() == streaming.details()
    assert unary.trailing_metadata() == streaming.trailing_metadata()
    return unary


def chat(*messages: tuple[str, str]) -> pb.GenerateRequest:
    return pb.GenerateRequest(
        chat=pb.ChatInput(messages=[pb.ChatMessage(role=role, content=content) for role, content in messages])
    )


def sampling(**params: Any) -> pb.GenerateRequest:
    return make_request(max_tokens=params.pop("max_tokens", 8), **params)


TEXT, IDS = "speculative.prediction.text", "speculative.prediction.tokenized.input_ids"
BAD = {
    "no input": (pb.GenerateRequest(), "input", "text, tokenized, chat"),
    "empty text": (pb.GenerateRequest(text=""), "text", "empty"),
    "no ids": (make_request([]), "tokenized.input_ids", "empty"),
    "no messages": (chat(), "chat.messages", "empty"),
    "no role": (chat(("user", "hi"), ("", "hi")), "chat.messages[1].role", "empty"),
    "long text": (pb.GenerateRequest(text="x" * MAX_MODEL_LEN), "text", "100 tokens, more than 99"),
    "long ids": (make_request([1] * 101, 1), "tokenized.input_ids", "101 tokens, more than 99"),
    "long chat": (chat(("user", "x" * 200)), "chat.messages", "more than 99"),
    "max_tokens 0": (make_request(max_tokens=0), "sampling_params.max_tokens", "at least 1"),
    "max_tokens beyond": (
        make_request([1] * 60, 41),
        "sampling_params.max_tokens",
        "41 exceeds the 40 positions left after the prompt (limit 100)",
    ),
    "max_tokens far beyond": (make_request(max_tokens=2**32 - 1), "sampling_params.max_tokens", "(limit 100)"),
    "unknown id": (make_request([1, VOCAB_SIZE]), "tokenized.input_ids", "257 must be below the vocabulary size 257"),
    "largest id": (make_request([2**32 - 1]), "tokenized.input_ids", "vocabulary size 257"),
    "unknown stop": (sampling(stop_token_ids=[3, 300]), "sampling_params.stop_token_ids", "300 is not below"),
    "many stops": (sampling(stop_token_ids=[3] * 1025), "sampling_params.stop_token_ids", "more than 1024"),
    "k beyond": (make_request(k=7), "speculative.num_speculative_tokens", "7 exceeds the limit of 6"),
    "method unknown": (make_request(method=9), "speculative.method", "unknown method 9"),
    "no prediction": (make_request(method=pb.DRAFT_METHOD_PREDICTION), "speculative.method", "requires"),
    "no content": (
        make_request(prediction=pb.Prediction()),
        "speculative.prediction",
        "one of text, tokenized must be set",
    ),
    "model": (make_request(method=pb.DRAFT_METHOD_MODEL, prediction="x"), "speculative.prediction", "not model"),
    "ngram": (make_request(method=pb.DRAFT_METHOD_NGRAM, prediction="x"), "speculative.prediction", "not ngram"),
    "suffix": (make_request(method=pb.DRAFT_METHOD_SUFFIX, prediction="x"), "speculative.prediction", "not suffix"),
    "empty prediction": (make_request(prediction=""), TEXT, "must not be empty"),
    "long prediction": (make_request(prediction="x" * MAX_MODEL_LEN), TEXT, "100 tokens, more than 99"),
    "large prediction": (
        make_request(prediction="é" * 500),
        TEXT,
        "1000 bytes, more than 495, the maximum for 99 tokens",
    ),
    "no predicted ids": (make_request(prediction=[]), IDS, "must not be empty"),
    "long predicted ids": (make_request(prediction=[1] * MAX_MODEL_LEN), IDS, "100 tokens, more than 99"),
    "unknown predicted id": (make_request(prediction=[1, VOCAB_SIZE]), IDS, "257 must be below"),
    "long request id": (make_request(request_id="x" * 129), "request_id", "more than 128 characters"),
    "temperature nan": (sampling(temperature=math.nan), "sampling_params.temperature", "nan"),
    "temperature inf": (sampling(temperature=math.inf), "sampling_params.temperature", "inf"),
    "top_p nan": (sampling(top_p=math.nan), "sampling_params.top_p", "nan"),
    "min_p -inf": (sampling(min_p=-math.inf), "sampling_params.min_p", "-inf"),
    "equal samples": (sampling(n=2), "sampling_params.n", "2 samples need a temperature above 0: they would be equal"),
    "empty stop": (sampling(stop=[""]), "sampling_params.stop[0]", "1 to 256"),
    "long stop": (sampling(stop=["a", "x" * 257]), "sampling_params.stop[1]", "257 characters"),
    "many stop strings": (sampling(stop=["a"] * 17), "sampling_params.stop", "more than 16"),
    "penalty nan": (sampling(presence_penalty=math.nan), "sampling_params.presence_penalty", "nan"),
}

OUT_OF_RANGE = {
    "temperature": [-0.1, 0.001, 100.5],
    "top_p": [0.0, -0.5, 1.01],
    "top_k": [-2],
    "min_p": [-0.1, 1.1],
    "repetition_penalty": [0.0, -1.0, 101.0],
    "frequency_penalty": [-2.1, 2.1],
    "presence_penalty": [-2.1, 2.1],
    "min_tokens": [9],
    "logprobs": [-1, 21],
    "n": [0, 65],
    "logit_bias": [{5: 100.5}, {5: -101.0}, {VOCAB_SIZE: 1.0}, {5: math.nan}],
}
AT_THE_EDGE = {
    "temperature": [0.01, 100.0],
    "top_p": [0.001, 1.0],
    "top_k": [1, 2**31 - 1],
    "min_p": [1.0],
    "repetition_penalty": [0.01, 100.0],
    "frequency_penalty": [-2.0, 2.0],
    "presence_penalty": [-2.0, 2.0],
    "min_tokens": [8],
    "logprobs": [0, 20],
    "logit_bias": [{5: 100.0, VOCAB_SIZE - 1: -100.0}],
    "stop": [["x" * 256, *["y"] * 15]],
}

NEUTRAL = {
    "temperature": 0.0,
    "top_p": 1.0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "frequency_penalty": 0.0,
    "presence_penalty": -0.0,
    "min_tokens": 0,
    "stop": [],
    "logit_bias": {},
    "seed": 2**64 - 1,
}


async def test_invalid_requests_name_the_field_and_the_limit(served: Serving) -> None:
    for case, (request, field, limit) in BAD.items():
        error = await both_refusals(served, request)
        assert error.code() is StatusCode.INVALID_ARGUMENT, case
        assert error.details().startswith(f"{field}: ")
        assert limit in error.details()
        assert violated_fields(error) == [field]
    assert served.target.requests == []


async def test_sampling_parameters_out_of_range_are_rejected(served: Serving) -> None:
    for name, value in [(n, v) for n, values in OUT_OF_RANGE.items() for v in values]:
        error = await both_refusals(served, sampling(**{name: value}))
        assert error.code() is StatusCode.INVALID_ARGUMENT, (name, value)
        assert error.details().startswith(f"sampling_params.{name}: ")
        assert violated_fields(error) == [f"sampling_params.{name}"]
    assert served.target.requests == []


async def test_values_at_the_limits_are_accepted(served: Serving) -> None:
    for name, value in [(n, v) for n, values in AT_THE_EDGE.items() for v in values]:
        assert (await served.stub.Generate(sampling(**{name: value}))).finish_reason
    for top_k in (0, -1):
        assert (await served.expect(sampling(top_k=top_k, **NEUTRAL))).seed == 2**64 - 1
    await served.expect(make_request([VOCAB_SIZE - 1] * 99, 1))
    await served.expect(make_request([1] * 60, 40))
    await served.expect(make_request(k=6, request_id="x" * 128, stop_token_ids=[VOCAB_SIZE - 1] * 1024))


async def test_rounding_at_a_limit_is_accepted(served: Serving) -> None:
    """Numbers that float32 rounds to or from a limit; the worker must see them as the coordinator does."""
    for name, value in (("temperature", -1e-7), ("top_p", 1.0000001)):
        assert (await served.stub.Generate(sampling(**{name: value}))).finish_reason
        low, high = RANGES[name]
        assert low <= getattr(served.target.requests[-1].items[0].sampling, name) <= high


async def test_the_number_of_samples_is_limited_to_window_and_queue() -> None:
    async with serving(with_draft=False, max_num_seqs=2, queue_size=1) as small:
        assert len((await small.stub.Generate(sampling(n=3, temperature=1.0))).other_samples) == 2
        error = await both_refusals(small, sampling(n=4, temperature=1.0))
        assert error.details() == "sampling_params.n: 4 is out of range: it must be from 1 to 3"
    # The target's slots limit the window.
    async with serving(RecordingTarget(slots=2), with_draft=False, max_num_seqs=8, queue_size=0) as small:
        error = await both_refusals(small, sampling(n=3, temperature=1.0))
        assert error.details() == "sampling_params.n: 3 is out of range: it must be from 1 to 2"


async def test_duplicate_request_ids_are_rejected_while_the_first_runs(served: Serving) -> None:
    served.target.open.clear()
    first = served.stub.Generate(make_request(request_id="twin"))
    await served.until(lambda info: info.running == 1)
    error = await both_refusals(served, make_request(request_id="twin"))
    assert error.code() is StatusCode.ALREADY_EXISTS
    assert "twin" in error.details()
    served.target.open.set()
    assert (await first).finish_reason == "length"
    await served.expect(make_request(request_id="twin"))


async def test_abort_needs_a_request_in_flight(served: Serving) -> None:
    await served.expect(make_request(request_id="done"))
    for request_id in ("nobody", "done", ""):
        with pytest.raises(grpc.aio.AioRpcError, match="request_id") as caught:
            await served.stub.Abort(pb.AbortRequest(request_id=request_id))
        assert caught.value.code() is (StatusCode.NOT_FOUND if request_id else StatusCode.INVALID_ARGUMENT)
    assert violated_fields(caught.value) == ["request_id"]


RAW = {
    "invalid UTF-8": b"\x0a\x03a\xff\xfe",
    "truncated": b"\x0a\x7fabc",
    "garbage": b"\xff" * 40,
    "unterminated length": b"\x0a\xff\xff\xff\xff\x0f",
}


async def test_undecodable_messages_are_rejected(served: Serving) -> None:
    for method, (case, payload) in product(("Generate", "Abort", "GenerateStream"), RAW.items()):
        call = served.channel.unary_stream if method == "GenerateStream" else served.channel.unary_unary
        answer = call(f"/{SERVICE}/{method}")(payload)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await (anext(aiter(answer)) if method == "GenerateStream" else answer)
        assert caught.value.code() is StatusCode.INVALID_ARGUMENT, case
        assert violated_fields(caught.value) == ["request"]


async def test_oversized_messages_and_unknown_methods_are_rejected(served: Serving) -> None:
    error = await both_refusals(served, pb.GenerateRequest(text="x" * 5000))
    assert error.code() is StatusCode.RESOURCE_EXHAUSTED
    assert "4096" in error.details()
    unknown = await refusal(served.channel.unary_unary(f"/{SERVICE}/Dream")(b""))
    assert unknown.code() is StatusCode.UNIMPLEMENTED


@pytest.mark.parametrize(
    ("template", "reason"),
    [("", "no chat template"), ("{{ raise_exception('roles must alternate') }}", "roles must alternate")],
)
async def test_chats_without_a_usable_template_are_rejected(template: str, reason: str) -> None:
    async with serving(TemplateTarget(template), with_draft=False) as served:
        error = await both_refusals(served, chat(("user", "hi")))
        assert error.code() is StatusCode.INVALID_ARGUMENT
        assert violated_fields(error) == ["chat.messages"]
        assert reason in error.details()
        assert (await served.stub.GetModelInfo(pb.GetModelInfoRequest())).has_chat_template is bool(template)
        await served.expect(make_request())


async def test_an_answer_has_a_maximum_of_log_probabilities(served: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(validation, "MAX_ANSWER_LOGPROBS", 2 * 8 * 21)
    largest = {"temperature": 1.0, "logprobs": 20, "max_tokens": 8, "n": 2}
    response = await served.stub.Generate(sampling(**largest))
    assert [len(each.logprobs) for each in (response, *response.other_samples)] == [8, 8]
    for more in ({"n": 3}, {"max_tokens": 9}):
        error = await both_refusals(served, sampling(**{**largest, **more}))
        assert error.code() is StatusCode.INVALID_ARGUMENT
        assert violated_fields(error) == ["sampling_params.logprobs"]
        assert "more than 336" in str(error.details())
