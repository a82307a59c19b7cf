"""The embedded target's chat template for chats with tools."""

import json
from typing import Any

import pytest
from read_answers import Answer, read, tool

from coordinator.prompts.chat_formats import tool_call_format
from coordinator.prompts.templates import Chat, ChatTemplate
from specpool.engine.models.embedded_pair import embedded_pair
from specpool.engine.models.embedded_template import TOOL_TEMPLATE
from specpool.engine.models.tokenizer import load_tokenizer
from specpool.openai.output import plan_output
from specpool.v1.generation_pb2 import GetModelInfoResponse

WEATHER = tool("weather")
CALL = {"name": "weather", "arguments": {"place": "Ulm"}}
CHAT: list[dict[str, Any]] = [
    {"role": "user", "content": "What is the weather in Ulm?"},
    {"role": "assistant", "content": None, "tool_calls": [{"id": "1", "type": "function", "function": CALL}] * 2},
    {"role": "tool", "tool_call_id": "1", "content": "rain"},
]
CALLS = "\n".join(['<tool_call>\n{"name": "weather", "arguments": {"place": "Ulm"}}\n</tool_call>'] * 2)


def test_tools_calls_and_results_are_rendered() -> None:
    system, *turns = ChatTemplate(TOOL_TEMPLATE, {}).render(Chat(CHAT, [WEATHER]), 1e4).split("<|im_end|>\n")
    assert system.startswith("<|im_start|>system\nYou are a helpful AI assistant named SmolLM")
    assert f"<tools>\n{json.dumps(WEATHER)}\n</tools>" in system
    assert turns == [
        "<|im_start|>user\nWhat is the weather in Ulm?",
        f"<|im_start|>assistant\n{CALLS}",
        "<|im_start|>user\n<tool_response>\nrain\n</tool_response>",
        "<|im_start|>assistant\n",
    ]


def test_a_system_message_replaces_the_default_one() -> None:
    chat = Chat([{"role": "system", "content": "Be brief."}, *CHAT[:1]], [WEATHER])
    system, *turns = ChatTemplate(TOOL_TEMPLATE, {}).render(chat, 1e4).split("<|im_end|>\n")
    assert system.startswith("<|im_start|>system\nBe brief.\n")
    assert len(turns) == 2


def test_calls_are_read_as_the_template_writes_them() -> None:
    plan = plan_output(GetModelInfoResponse(tool_call_format=tool_call_format(TOOL_TEMPLATE)), tools=[WEATHER])
    assert read(plan, [CALLS]) == Answer("", "", [["weather", '{"place": "Ulm"}']] * 2)


@pytest.mark.real_pair
def test_only_chats_with_tools_use_the_template() -> None:
    templates = load_tokenizer(str(embedded_pair().target)).chat_template
    assert templates["tool_use"] == TOOL_TEMPLATE
    assert "tool" not in templates["default"]
