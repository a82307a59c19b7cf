"""Requests to models that reason: what clients learn about the reasoning, and limits on it."""

from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio
from grpc import StatusCode
from serving import RecordingTarget, Serving, make_request, refusal, serving, violated_fields
from template_target import TemplateTarget
from tiny_tokenizers import BYTES

from specpool.v1 import generation_pb2 as pb

TEMPLATE = (
    "{% for m in messages %}{{ m.content }}\n{% endfor %}{% if tools %}<tool_call>{% endif %}A: "
    "{% if mode != 'quick' %}<think>\n{% endif %}"
)
THINK = pb.ReasoningTags(begin="<think>", end="</think>")
AFTER, LIMIT = "sampling_params.constraint_after_reasoning", "sampling_params.max_thinking_tokens"


@pytest_asyncio.fixture
async def served() -> AsyncIterator[Serving]:
    async with serving(TemplateTarget(TEMPLATE), reasoning_tags="<think>,</think>") as serving_:
        yield serving_
        await serving_.until_idle()


def chat(content: str = "Hi", mode: str = "", **params: Any) -> pb.GenerateRequest:
    request = pb.GenerateRequest(sampling_params=pb.SamplingParams(max_tokens=8, **params))
    request.chat.messages.add(role="user", content=content)
    request.chat.chat_template_kwargs["mode"] = mode
    return request


def text(prompt: str, max_tokens: int = 8, **params: Any) -> pb.GenerateRequest:
    return make_request(BYTES.encode(prompt).ids, max_tokens, **params)


async def test_model_info_tells_what_the_template_uses(served: Serving) -> None:
    info = await served.stub.GetModelInfo(pb.GetModelInfoRequest())
    assert (info.reasoning, info.tool_call_format) == (THINK, "hermes")
    assert info.chat_template_options == ["mode"]


async def test_model_info_is_empty_for_a_model_without_reasoning_and_tools() -> None:
    async with serving(TemplateTarget("{{ messages }}"), with_draft=False) as served:
        info = await served.stub.GetModelInfo(pb.GetModelInfoRequest())
        assert not info.HasField("reasoning")
        assert (info.tool_call_format, list(info.chat_template_options)) == ("", [])


@pytest.mark.parametrize(
    ("request_", "expected"),
    [
        (chat(), True),
        (chat(mode="quick"), False),
        (chat("<think>", mode="quick"), False),
        (text("<think>Hm"), True),
        (text("<think>Hm</think>"), False),
    ],
)
async def test_every_response_tells_whether_it_starts_in_reasoning(
    served: Serving, request_: pb.GenerateRequest, expected: bool
) -> None:
    messages = [message async for message in served.stub.GenerateStream(request_)]
    assert {message.starts_in_reasoning for message in messages} == {expected}
    response = await served.stub.Generate(request_)
    assert messages[-1].complete.starts_in_reasoning == response.starts_in_reasoning == expected


@pytest.mark.parametrize(
    ("params", "field", "reason"),
    [
        ({"constraint_after_reasoning": True}, AFTER, "must be given with a constraint"),
        ({"constraint_after_reasoning": True, "regex": "a"}, AFTER, "the model has no reasoning tags"),
        ({"max_thinking_tokens": 0}, LIMIT, "the model has no reasoning tags"),
    ],
)
async def test_limits_on_reasoning_need_a_model_that_reasons(params: dict[str, Any], field: str, reason: str) -> None:
    async with serving(RecordingTarget(), with_draft=False) as served:
        error = await refusal(served.stub.Generate(make_request(**params)))
        assert error.code() is StatusCode.INVALID_ARGUMENT
        assert violated_fields(error) == [field]
        assert error.details().startswith(f"{field}: {reason}")
        assert served.target.requests == []
