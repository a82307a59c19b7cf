"""Prompts of requests as span attributes, in the format of OpenTelemetry's GenAI conventions."""

import json
from typing import Any

from specpool.rpc.observability.tracing import Attributes
from specpool.v1 import generation_pb2 as pb


def prompt_attributes(request: pb.GenerateRequest) -> Attributes:
    """Return the attributes of a prompt. None for token ids, which are not detokenized."""
    if request.text:
        return {"gen_ai.input.messages": json.dumps([{"role": "user", "parts": [text_part(request.text)]}])}
    if not request.chat.messages:
        return {}
    messages = [{"role": message.role, "parts": _parts(message)} for message in request.chat.messages]
    tools = {"gen_ai.tool.definitions": f"[{', '.join(request.chat.tools)}]"} if request.chat.tools else {}
    return {"gen_ai.input.messages": json.dumps(messages), **tools}


def text_part(text: str) -> dict[str, Any]:
    """Return a part of a message that holds text."""
    return {"type": "text", "content": text}


def _parts(message: pb.ChatMessage) -> list[dict[str, Any]]:
    if message.role == "tool":
        return [{"type": "tool_call_response", "id": message.tool_call_id, "response": message.content}]
    reasoning = [{"type": "reasoning", "content": message.reasoning_content}] if message.reasoning_content else []
    calls = [
        {"type": "tool_call", "id": call.id, "name": call.function.name, "arguments": call.function.arguments}
        for call in message.tool_calls
    ]
    return [*reasoning, *([text_part(message.content)] if message.content or not calls else []), *calls]
