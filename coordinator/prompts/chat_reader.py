"""Reads chats from requests: checks their sizes, and converts them to the plain data that templates render."""

import json
import math
from collections.abc import Sized
from typing import Any

from google.protobuf.struct_pb2 import Struct, Value

from coordinator.prompts.templates import Chat
from specpool.protocol.errors import InvalidArgumentError
from specpool.v1 import generation_pb2 as pb

MAX_MESSAGES, MAX_TOOLS, MAX_TOOL_CALLS = 1024, 128, 1024
MAX_ROLE_LENGTH, MAX_NAME_LENGTH = 64, 256
MAX_OPTIONS, MAX_OPTION_LENGTH, MAX_OPTIONS_BYTES = 64, 64, 65_536
# Levels of objects and lists in options, tools and arguments. Protobuf cannot parse many more.
MAX_DEPTH = 32
# Above this, a double cannot represent every integer.
MAX_EXACT_INTEGER = 2**53

OPTIONS = "chat.chat_template_kwargs"


def check_chat(chat: pb.ChatInput) -> int:
    """Check counts and lengths; return the bytes of all text. Raises InvalidArgumentError."""
    if not chat.messages:
        raise InvalidArgumentError("chat.messages", "must not be empty")
    check_size("chat.messages", chat.messages, MAX_MESSAGES)
    check_size("chat.tools", chat.tools, MAX_TOOLS)
    _check_options(chat.chat_template_kwargs)
    calls = sum(len(message.tool_calls) for message in chat.messages)
    if calls > MAX_TOOL_CALLS:
        raise InvalidArgumentError(
            "chat.messages", f"has {calls} tool calls, more than {MAX_TOOL_CALLS}", limit=MAX_TOOL_CALLS
        )
    texts = list(chat.tools)
    for index, message in enumerate(chat.messages):
        path = f"chat.messages[{index}]"
        _check_name(f"{path}.role", message.role, MAX_ROLE_LENGTH)
        for name in ("name", "tool_call_id"):
            check_size(f"{path}.{name}", getattr(message, name), MAX_NAME_LENGTH, "characters")
        for position, call in enumerate(message.tool_calls):
            _check_call(f"{path}.tool_calls[{position}]", call)
        texts += [message.content, message.reasoning_content, *(call.function.arguments for call in message.tool_calls)]
    return sum(len(text.encode()) for text in texts)


def read_chat(chat: pb.ChatInput) -> Chat:
    """Convert a checked chat. Raises InvalidArgumentError."""
    return Chat(
        messages=[_message(f"chat.messages[{index}]", message) for index, message in enumerate(chat.messages)],
        tools=[_json_object(f"chat.tools[{index}]", tool) for index, tool in enumerate(chat.tools)],
        options=_struct(chat.chat_template_kwargs, MAX_DEPTH),
    )


def _check_options(options: Struct) -> None:
    check_size(OPTIONS, options.fields, MAX_OPTIONS)
    if any(len(name) > MAX_OPTION_LENGTH for name in options.fields):
        reason = f"has a name of more than {MAX_OPTION_LENGTH} characters"
        raise InvalidArgumentError(OPTIONS, reason, limit=MAX_OPTION_LENGTH)
    if (size := options.ByteSize()) > MAX_OPTIONS_BYTES:
        raise InvalidArgumentError(OPTIONS, f"has {size} bytes, more than {MAX_OPTIONS_BYTES}", limit=MAX_OPTIONS_BYTES)


def _check_call(path: str, call: pb.ToolCall) -> None:
    check_size(f"{path}.id", call.id, MAX_NAME_LENGTH, "characters")
    if call.type not in ("", "function"):
        raise InvalidArgumentError(f"{path}.type", 'must be "function"')
    _check_name(f"{path}.function.name", call.function.name, MAX_NAME_LENGTH)


def _check_name(field: str, name: str, limit: int) -> None:
    if not name:
        raise InvalidArgumentError(field, "must not be empty")
    check_size(field, name, limit, "characters")


def check_size(field: str, values: Sized, limit: int, unit: str = "entries") -> None:
    """Raise InvalidArgumentError if a field has too many values."""
    if len(values) > limit:
        raise InvalidArgumentError(field, f"has more than {limit} {unit}", limit=limit)


def _message(path: str, message: pb.ChatMessage) -> dict[str, Any]:
    plain: dict[str, Any] = {"role": message.role}
    # Many templates would render a null content. Like transformers, omit it.
    if message.HasField("content") or not message.tool_calls:
        plain["content"] = message.content
    plain |= {name: getattr(message, name) for name in ("name", "tool_call_id") if message.HasField(name)}
    if message.tool_calls:
        calls = enumerate(message.tool_calls)
        plain["tool_calls"] = [_call(f"{path}.tool_calls[{index}]", call) for index, call in calls]
    if message.HasField("reasoning_content"):
        plain["reasoning_content"] = plain["thinking"] = message.reasoning_content
    return plain


def _call(path: str, call: pb.ToolCall) -> dict[str, Any]:
    """Convert a tool call. Templates read its arguments as an object."""
    arguments = _json_object(f"{path}.function.arguments", call.function.arguments or "{}")
    function = {"name": call.function.name, "arguments": arguments}
    return ({"id": call.id} if call.id else {}) | {"type": "function", "function": function}


def _json_object(field: str, text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
        # Python accepts NaN and lone surrogates, which are invalid JSON.
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except UnicodeEncodeError:
        raise InvalidArgumentError(field, "has a lone surrogate") from None
    except ValueError as error:
        raise InvalidArgumentError(field, f"is not JSON: {error}") from None
    except RecursionError:
        raise InvalidArgumentError(field, f"has more than {MAX_DEPTH} levels") from None
    if not isinstance(value, dict):
        raise InvalidArgumentError(field, "must be a JSON object")
    _check_depth(field, value, MAX_DEPTH)
    return value


def _check_depth(field: str, value: object, levels: int) -> None:
    if isinstance(value, dict | list):
        if not levels:
            raise InvalidArgumentError(field, f"has more than {MAX_DEPTH} levels")
        for element in value.values() if isinstance(value, dict) else value:
            _check_depth(field, element, levels - 1)


def _struct(struct: Struct, levels: int) -> dict[str, Any]:
    """Convert options. Protobuf does not keep the order of keys, so sort them."""
    return {name: _value(struct.fields[name], levels - 1) for name in sorted(struct.fields)}


def _value(value: Value, levels: int) -> Any:
    kind = value.WhichOneof("kind")
    if kind in ("struct_value", "list_value"):
        if not levels:
            raise InvalidArgumentError(OPTIONS, f"has more than {MAX_DEPTH} levels")
        if kind == "struct_value":
            return _struct(value.struct_value, levels)
        return [_value(element, levels - 1) for element in value.list_value.values]
    if kind == "number_value":
        return _number(value.number_value)
    return {"bool_value": value.bool_value, "string_value": value.string_value}.get(kind or "")


def _number(number: float) -> int | float:
    """Return an integer where possible: it was one before protobuf made it a double."""
    if number.is_integer() and abs(number) <= MAX_EXACT_INTEGER:
        return int(number)
    if not math.isfinite(number):
        raise InvalidArgumentError(OPTIONS, f"{number} is not a finite number")
    return number
