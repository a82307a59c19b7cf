"""Conversations in OpenAI's format as request messages."""

from typing import Any

import pytest

from specpool.client import make_request
from specpool.v1 import generation_pb2 as pb

USER = {"role": "user", "content": "hi"}
CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"b": 1, "a": 2}'}}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"z": 1, "a": 2}}}


def test_messages_of_openai_are_accepted_unchanged() -> None:
    chat = make_request(
        [
            USER,
            # As OpenAI's client dumps it.
            {"role": "assistant", "content": None, "refusal": None, "tool_calls": [CALL]},
            {"role": "tool", "tool_call_id": "c1", "content": "3", "name": "f"},
            {"role": "assistant", "content": "", "reasoning_content": "hm", "tool_calls": None},
        ],
        tools=[TOOL],
        chat_template_kwargs={"enable_thinking": False, "depth": (1, {"x": None})},
    ).chat
    assert chat.tools == ['{"type": "function", "function": {"name": "f", "parameters": {"z": 1, "a": 2}}}']
    assert chat.chat_template_kwargs == {"enable_thinking": False, "depth": [1, {"x": None}]}
    _, asks, result, answer = chat.messages
    assert not asks.HasField("content")
    function = pb.FunctionCall(name="f", arguments='{"b": 1, "a": 2}')
    assert list(asks.tool_calls) == [pb.ToolCall(id="c1", type="function", function=function)]
    assert result == pb.ChatMessage(role="tool", content="3", name="f", tool_call_id="c1")
    assert answer == pb.ChatMessage(role="assistant", content="", reasoning_content="hm")


def test_arguments_may_be_a_dictionary() -> None:
    """As in chats for transformers."""
    call = {"function": {"name": "f", "arguments": {"b": 1, "ä": [None]}}}
    (message,) = make_request([{"role": "assistant", "tool_calls": [call]}]).chat.messages
    assert message.tool_calls[0].function.arguments == '{"b": 1, "ä": [null]}'


def calling(**changes: Any) -> dict[str, Any]:
    return {"role": "assistant", "tool_calls": [CALL | changes]}


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        ([USER, "hi"], "message 1 must be a dictionary"),
        ([{"content": "hi"}], "message 0: role must be a string"),
        ([USER, {"role": "user"}], "message 1: content must be a string"),
        ([{"role": "user", "content": None}], "message 0: content must be a string"),
        ([{"role": "user", "content": ["hi"]}], "message 0: content must be a string"),
        (
            [USER, {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "image_url"}]}],
            "message 1: content has a part of type 'image_url'; only text is supported",
        ),
        ([USER | {"nme": "x", 5: "y"}], "message 0: unknown key 'nme', 5"),
        ([USER | {"name": 5}], "message 0: name must be a string"),
        ([USER | {"tool_calls": {}}], "message 0: tool_calls must be a list"),
        ([USER | {"tool_calls": ["f"]}], r"message 0: tool_calls\[0\] must be a dictionary"),
        ([USER, calling(function=None)], r"message 1: tool_calls\[0\]\.function must be a dictionary"),
        ([calling(function={"name": 5})], r"message 0: tool_calls\[0\]\.function\.name must be a string"),
        ([calling(function={"arguments": {"x": {1}}})], r"tool_calls\[0\]\.function\.arguments: is not JSON"),
        ([calling(function={"arguments": 5})], r"tool_calls\[0\]\.function\.arguments must be a string"),
        ([calling(id=5)], r"tool_calls\[0\]\.id must be a string"),
        ([calling(index=0)], r"tool_calls\[0\]: unknown key 'index'"),
    ],
)
def test_invalid_messages_are_named(messages: Any, reason: str) -> None:
    with pytest.raises(TypeError, match=reason):
        make_request(messages)


def nested(levels: int) -> dict[str, Any]:
    return {"x": nested(levels - 1)} if levels else {}


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"tools": TOOL}, "tools: must be a list"),
        ({"tools": "[]"}, "tools: must be a list"),
        ({"tools": [TOOL, "f"]}, r"tools\[1\] must be a dictionary"),
        ({"tools": [{"x": float("nan")}]}, r"tools\[0\]: is not JSON"),
        ({"tools": [{"x": test_invalid_messages_are_named}]}, r"tools\[0\]: is not JSON"),
        ({"chat_template_kwargs": "{}"}, "chat_template_kwargs: must be a dictionary"),
        ({"chat_template_kwargs": {"x": float("inf")}}, "chat_template_kwargs: is not JSON"),
        ({"chat_template_kwargs": {"x": 10**400}}, "chat_template_kwargs: has a number that is too large"),
        ({"chat_template_kwargs": {"x": nested(32)}}, "chat_template_kwargs: has more than 32 levels"),
    ],
)
def test_invalid_chat_options_are_named(options: Any, reason: str) -> None:
    with pytest.raises(TypeError, match=reason):
        make_request([USER], **options)
