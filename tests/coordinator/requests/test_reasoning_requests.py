"""Requests to reasoning models: reported tags, and limits on the reasoning."""

from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio
from grpc import StatusCode
from serving import RecordingTarget, Serving, make_request, refusal, serving, violated_fields
from template_target import TemplateTarget
from tiny_tokenizers import BYTES

from specpool.v1 import generation_pb2 as pb
from specpool.v1 import target_worker_pb2

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


async def test_a_limit_needs_a_constraint_that_allows_reasoning(served: Serving) -> None:
    error = await refusal(served.stub.Generate(chat(max_thinking_tokens=3, regex="a")))
    assert (error.code(), violated_fields(error)) == (StatusCode.INVALID_ARGUMENT, [LIMIT])
    assert error.details() == f"{LIMIT}: with a constraint, requires constraint_after_reasoning"


LIMITS: list[tuple[dict[str, Any], bool, tuple[int | None, bool] | None]] = [
    ({}, False, None),
    ({"max_thinking_tokens": 8}, True, None),  # max_tokens ends the answer first
    ({"max_thinking_tokens": 7}, True, (7, False)),
    ({"max_thinking_tokens": 0}, False, (0, False)),
    ({"regex": "a"}, False, None),  # the constraint allows no reasoning
    ({"regex": "a", "constraint_after_reasoning": True}, True, (None, True)),
    ({"regex": "a", "constraint_after_reasoning": True, "max_thinking_tokens": 3}, False, (3, True)),
]


@pytest.mark.parametrize(("params", "inside", "expected"), LIMITS)
async def test_limits_reach_the_target_worker(
    served: Serving, params: dict[str, Any], inside: bool, expected: tuple[int | None, bool] | None
) -> None:
    await served.stub.Generate(chat(mode="" if inside else "quick", **params))
    (sampling,) = (item.sampling for item in first_items(served.target))
    if expected is None:
        assert not sampling.HasField("reasoning")
        return
    sent = sampling.reasoning
    assert (sent.max_tokens if sent.HasField("max_tokens") else None, sent.grammar_after) == expected
    assert (BYTES.decode(sent.begin), BYTES.decode(sent.end)) == (THINK.begin, THINK.end)
    assert sent.starts_inside == inside


def first_items(target: Any) -> list[target_worker_pb2.VerifyItem]:
    """Return the items with sampling parameters."""
    return [item for request in target.requests for item in request.items if item.HasField("sampling")]
