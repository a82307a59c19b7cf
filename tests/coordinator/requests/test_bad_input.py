"""What is wrong with a request is said by field and limit, and the server goes on serving."""

import math
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
import pytest_asyncio
from grpc import StatusCode
from serving import RecordingTarget, Serving, make_request, serving, stream, violated_fields

from specpool.protocol.sampling import RANGES
from specpool.testing import VOCAB_SIZE
from specpool.v1 import generation_pb2 as pb

MAX_MODEL_LEN = 100
SERVICE = "specpool.v1.GenerationService"


@pytest_asyncio.fixture
async def served() -> AsyncIterator[Serving]:
    """A server with small limits, which must still serve after each test."""
    limits = {"max_num_speculative_tokens": 6, "max_request_bytes": 4096}
    async with serving(RecordingTarget(max_model_len=MAX_MODEL_LEN), with_draft=False, **limits) as serving_:
        yield serving_
        await serving_.expect(make_request())
        info = await serving_.until_idle()
        assert "error" not in info.counters.finished


async def refusal(served: Serving, request: pb.GenerateRequest) -> grpc.aio.AioRpcError:
    """How the request is refused, by both calls alike."""
    with pytest.raises(grpc.aio.AioRpcError) as unary:
        await served.stub.Generate(request)
    with pytest.raises(grpc.aio.AioRpcError) as streaming:
        await stream(served, request)
    assert unary.value.code() is streaming.value.code()
    assert unary.value.details() == streaming.value.details()
    assert unary.value.trailing_metadata() == streaming.value.trailing_metadata()
    return unary.value


def chat(*messages: tuple[str, str]) -> pb.GenerateRequest:
    return pb.GenerateRequest(
        chat=pb.ChatInput(messages=[pb.ChatMessage(role=role, content=content) for role, content in messages])
    )


def sampling(**params: Any) -> pb.GenerateRequest:
    return make_request(max_tokens=params.pop("max_tokens", 8), **params)


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
    "max_tokens beyond": (make_request([1] * 60, 41), "sampling_params.max_tokens", "41 is beyond 40"),
    "max_tokens far beyond": (make_request(max_tokens=2**32 - 1), "sampling_params.max_tokens", "100 positions"),
    "unknown id": (make_request([1, VOCAB_SIZE]), "tokenized.input_ids", "257 must be below the vocabulary size 257"),
    "largest id": (make_request([2**32 - 1]), "tokenized.input_ids", "vocabulary size 257"),
    "unknown stop": (sampling(stop_token_ids=[3, 300]), "sampling_params.stop_token_ids", "300 is not below"),
    "many stops": (sampling(stop_token_ids=[3] * 1025), "sampling_params.stop_token_ids", "more than 1024"),
    "k beyond": (make_request(k=7), "speculative.num_speculative_tokens", "7 is beyond the limit of 6"),
    "method unknown": (make_request(method=9), "speculative.method", "9 is none of the methods"),
    "long request id": (make_request(request_id="x" * 129), "request_id", "more than 128 characters"),
    "temperature nan": (sampling(temperature=math.nan), "sampling_params.temperature", "nan"),
    "temperature inf": (sampling(temperature=math.inf), "sampling_params.temperature", "inf"),
    "top_p nan": (sampling(top_p=math.nan), "sampling_params.top_p", "nan"),
    "min_p -inf": (sampling(min_p=-math.inf), "sampling_params.min_p", "-inf"),
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


@pytest.mark.parametrize("case", BAD)
async def test_bad_requests_are_refused_with_the_field_and_the_limit(served: Serving, case: str) -> None:
    request, field, limit = BAD[case]
    error = await refusal(served, request)
    assert error.code() is StatusCode.INVALID_ARGUMENT
    assert error.details().startswith(f"{field}: ")
    assert limit in error.details()
    assert violated_fields(error) == [field]
    assert served.target.requests == []


@pytest.mark.parametrize(("name", "value"), [(n, v) for n, values in OUT_OF_RANGE.items() for v in values])
async def test_sampling_parameters_out_of_their_range_are_refused(served: Serving, name: str, value: Any) -> None:
    error = await refusal(served, sampling(**{name: value}))
    assert error.code() is StatusCode.INVALID_ARGUMENT
    assert error.details().startswith(f"sampling_params.{name}: ")
    assert violated_fields(error) == [f"sampling_params.{name}"]
    assert served.target.requests == []


@pytest.mark.parametrize(("name", "value"), [(n, v) for n, values in AT_THE_EDGE.items() for v in values])
async def test_sampling_parameters_at_the_edge_are_accepted(served: Serving, name: str, value: Any) -> None:
    assert (await served.stub.Generate(sampling(**{name: value}))).finish_reason


@pytest.mark.parametrize(
    ("stop", "field"),
    [
        ([""], "sampling_params.stop[0]"),
        (["a", "x" * 257], "sampling_params.stop[1]"),
        (["a"] * 17, "sampling_params.stop"),
    ],
)
async def test_stop_strings_out_of_their_range_are_refused(served: Serving, stop: list[str], field: str) -> None:
    error = await refusal(served, sampling(stop=stop))
    assert error.code() is StatusCode.INVALID_ARGUMENT
    assert violated_fields(error) == [field]


@pytest.mark.parametrize("top_k", [0, -1])
async def test_neutral_values_are_accepted(served: Serving, top_k: int) -> None:
    response = await served.expect(sampling(top_k=top_k, **NEUTRAL))
    assert response.seed == 2**64 - 1


# What float32 makes of a number at a limit; the worker must see it as the coordinator does.
@pytest.mark.parametrize(
    ("name", "value"), [("temperature", -1e-7), ("top_p", 1.0000001), ("min_p", 1.0000004), ("min_p", -1e-9)]
)
async def test_rounding_at_a_limit_is_no_error(served: Serving, name: str, value: float) -> None:
    assert (await served.stub.Generate(sampling(**{name: value}))).finish_reason
    ((item, *_), *_) = [request.items for request in served.target.requests]
    least, most = RANGES[name]
    assert least <= getattr(item.sampling, name) <= most


async def test_several_samples_need_a_temperature(served: Serving) -> None:
    error = await refusal(served, sampling(n=2))
    assert error.code() is StatusCode.INVALID_ARGUMENT
    assert error.details() == "sampling_params.n: 2 samples need a temperature above 0: they would be equal"
    assert violated_fields(error) == ["sampling_params.n"]


async def test_no_more_samples_than_can_ever_wait(served: Serving) -> None:
    async with serving(with_draft=False, max_num_seqs=2, queue_size=1) as small:
        assert len((await small.stub.Generate(sampling(n=3, temperature=1.0))).other_samples) == 2
        error = await refusal(small, sampling(n=4, temperature=1.0))
        assert error.details() == "sampling_params.n: 4 is out of range: it must be from 1 to 3"
    # The window is no larger than the target's slots.
    async with serving(RecordingTarget(slots=2), with_draft=False, max_num_seqs=8, queue_size=0) as small:
        error = await refusal(small, sampling(n=3, temperature=1.0))
        assert error.details() == "sampling_params.n: 3 is out of range: it must be from 1 to 2"


async def test_limits_themselves_are_accepted(served: Serving) -> None:
    await served.expect(make_request([VOCAB_SIZE - 1] * 99, 1))
    await served.expect(make_request([1] * 60, 40))
    await served.expect(make_request(k=6, request_id="x" * 128, stop_token_ids=[VOCAB_SIZE - 1] * 1024))


async def test_a_request_id_in_flight_is_refused_and_the_first_goes_on(served: Serving) -> None:
    served.target.open.clear()
    first = served.stub.Generate(make_request(request_id="twin"))
    await served.until(lambda info: info.running == 1)
    error = await refusal(served, make_request(request_id="twin"))
    assert error.code() is StatusCode.ALREADY_EXISTS
    assert "twin" in error.details()
    served.target.open.set()
    assert (await first).finish_reason == "length"
    await served.expect(make_request(request_id="twin"))


@pytest.mark.parametrize(
    ("request_id", "code"), [("nobody", StatusCode.NOT_FOUND), ("", StatusCode.INVALID_ARGUMENT)], ids=str
)
async def test_abort_of_nothing_is_refused(served: Serving, request_id: str, code: StatusCode) -> None:
    with pytest.raises(grpc.aio.AioRpcError, match="request_id") as caught:
        await served.stub.Abort(pb.AbortRequest(request_id=request_id))
    assert caught.value.code() is code
    assert code is StatusCode.NOT_FOUND or violated_fields(caught.value) == ["request_id"]


async def test_abort_of_what_has_ended_is_refused(served: Serving) -> None:
    await served.expect(make_request(request_id="done"))
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await served.stub.Abort(pb.AbortRequest(request_id="done"))
    assert caught.value.code() is StatusCode.NOT_FOUND


RAW = {
    "invalid UTF-8": b"\x0a\x03a\xff\xfe",
    "cut short": b"\x0a\x7fabc",
    "garbage": b"\xff" * 40,
    "length without end": b"\x0a\xff\xff\xff\xff\x0f",
}


@pytest.mark.parametrize("case", RAW)
@pytest.mark.parametrize("method", ["Generate", "Abort"])
async def test_bytes_that_are_no_request_are_refused(served: Serving, case: str, method: str) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await served.channel.unary_unary(f"/{SERVICE}/{method}")(RAW[case])
    assert caught.value.code() is StatusCode.INVALID_ARGUMENT
    assert violated_fields(caught.value) == ["request"]


@pytest.mark.parametrize("case", RAW)
async def test_bytes_that_are_no_request_for_a_stream_are_refused(served: Serving, case: str) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await anext(aiter(served.channel.unary_stream(f"/{SERVICE}/GenerateStream")(RAW[case])))
    assert caught.value.code() is StatusCode.INVALID_ARGUMENT
    assert violated_fields(caught.value) == ["request"]


async def test_text_that_is_no_utf8_is_refused(served: Serving) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await served.channel.unary_unary(f"/{SERVICE}/Generate")(b"\x12\x03a\xff\xfe")
    assert caught.value.code() is StatusCode.INVALID_ARGUMENT


async def test_a_message_that_is_too_large_is_refused(served: Serving) -> None:
    error = await refusal(served, pb.GenerateRequest(text="x" * 5000))
    assert error.code() is StatusCode.RESOURCE_EXHAUSTED
    assert "4096" in error.details()


async def test_unknown_methods_are_unimplemented(served: Serving) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await served.channel.unary_unary(f"/{SERVICE}/Dream")(b"")
    assert caught.value.code() is StatusCode.UNIMPLEMENTED


class TemplateTarget(RecordingTarget):
    """With another chat template."""

    def __init__(self, chat_template: str) -> None:
        super().__init__()
        self._chat_template = chat_template

    async def GetTokenizer(self, request: Any, context: Any) -> Any:
        response = await super().GetTokenizer(request, context)
        response.chat_template = self._chat_template
        return response


async def test_a_chat_without_a_template_is_refused() -> None:
    async with serving(TemplateTarget(""), with_draft=False) as served:
        error = await refusal(served, chat(("user", "hi")))
        assert error.code() is StatusCode.INVALID_ARGUMENT
        assert violated_fields(error) == ["chat.messages"]
        assert "no chat template" in error.details()
        assert not (await served.stub.GetModelInfo(pb.GetModelInfoRequest())).has_chat_template
        await served.expect(make_request())


async def test_a_chat_that_the_template_refuses_is_refused_with_its_reason() -> None:
    async with serving(TemplateTarget("{{ raise_exception('roles must alternate') }}"), with_draft=False) as served:
        error = await refusal(served, chat(("user", "hi")))
        assert error.code() is StatusCode.INVALID_ARGUMENT
        assert violated_fields(error) == ["chat.messages"]
        assert "roles must alternate" in error.details()
        await served.expect(make_request())
