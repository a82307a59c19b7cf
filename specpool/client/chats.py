"""Conversations in the format of OpenAI's API, as protobuf messages. Errors name the message and the key."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from google.protobuf.struct_pb2 import Struct

from specpool.v1 import generation_pb2 as pb

Chat = Sequence[Mapping[str, Any]]
"""A conversation of {"role": ..., "content": ...}, with the optional keys `name`, `tool_calls`, `tool_call_id` and
`reasoning_content`. Messages with tool calls need no content."""

MAX_LEVELS = 32
"""Maximum depth of options. Protobuf cannot parse much more."""
TEXTS = ("role", "content", "name", "tool_call_id", "reasoning_content")


def make_chat(messages: Chat, tools: Any = None, chat_template_kwargs: Any = None) -> pb.ChatInput:
    """Build a chat. Raises TypeError."""
    return pb.ChatInput(
        messages=[_message(f"message {index}", message) for index, message in enumerate(messages)],
        tools=_tools(tools),
        chat_template_kwargs=None if chat_template_kwargs is None else _options(chat_template_kwargs),
    )


def _message(name: str, message: Any) -> pb.ChatMessage:
    given = _given(name, message, {*TEXTS, "tool_calls"})
    calls = given.pop("tool_calls", [])
    required = {"role"} if calls else {"role", "content"}
    content = given.get("content")
    for part in content if isinstance(content, list) else ():
        if isinstance(part, Mapping) and part.get("type", "text") != "text":  # "image", "image_url", "input_audio", ...
            raise TypeError(f"{name}: content has a part of type {part['type']!r}; only text is supported")
    for key in TEXTS:
        if (key in given or key in required) and not isinstance(given.get(key), str):
            raise TypeError(f"{name}: {key} must be a string")
    if not isinstance(calls, Sequence) or isinstance(calls, str):
        raise TypeError(f"{name}: tool_calls must be a list")
    tool_calls = [_tool_call(f"{name}: tool_calls[{index}]", call) for index, call in enumerate(calls)]
    return pb.ChatMessage(**given, tool_calls=tool_calls)


def _tool_call(name: str, call: Any) -> pb.ToolCall:
    given = _given(name, call, {"id", "type", "function"})
    function = _given(f"{name}.function", given.pop("function", None), {"name", "arguments"})
    if isinstance(function.get("arguments"), Mapping):
        function["arguments"] = _json(f"{name}.function.arguments", function["arguments"])
    for path, values in ((name, given), (f"{name}.function", function)):
        for key, value in values.items():
            if not isinstance(value, str):
                raise TypeError(f"{path}.{key} must be a string")
    return pb.ToolCall(**given, function=pb.FunctionCall(**function))


def _given(name: str, value: Any, keys: set[str]) -> dict[str, Any]:
    """Return the values of a dictionary that are not None. Raises TypeError for other keys than `keys`."""
    if not isinstance(value, Mapping):
        raise TypeError(f"{name} must be a dictionary")
    given = {key: item for key, item in value.items() if item is not None}
    if unknown := given.keys() - keys:
        raise TypeError(f"{name}: unknown key {', '.join(sorted(map(repr, unknown)))}")
    return given


def _tools(tools: Any) -> list[str]:
    if not isinstance(tools, Sequence | None) or isinstance(tools, str):
        raise TypeError("tools: must be a list of dictionaries")
    for index, tool in enumerate(tools or ()):
        if not isinstance(tool, Mapping):
            raise TypeError(f"tools[{index}] must be a dictionary")
    return [_json(f"tools[{index}]", tool) for index, tool in enumerate(tools or ())]


def _json(name: str, value: Mapping[str, Any]) -> str:
    try:
        return json.dumps(dict(value), ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise TypeError(f"{name}: is not JSON: {error}") from None


def _options(options: Any) -> Struct:
    if not isinstance(options, Mapping):
        raise TypeError("chat_template_kwargs: must be a dictionary")
    plain = json.loads(_json("chat_template_kwargs", options))
    if _levels(plain) > MAX_LEVELS:
        raise TypeError(f"chat_template_kwargs: has more than {MAX_LEVELS} levels")
    struct = Struct()
    try:
        struct.update(plain)
    except OverflowError:
        raise TypeError("chat_template_kwargs: has a number that is too large") from None
    return struct


def _levels(value: object) -> int:
    elements = value.values() if isinstance(value, dict) else value if isinstance(value, list) else None
    return 0 if elements is None else 1 + max(map(_levels, elements), default=0)
