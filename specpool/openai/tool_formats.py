"""The formats in which models call tools, by the name in `GetModelInfoResponse.tool_call_format`."""

from collections.abc import Callable
from dataclasses import dataclass

from specpool.openai import call_readers
from specpool.openai.call_grammars import CallGrammar, HarmonyGrammar, ListGrammar, TagGrammar
from specpool.openai.deltas import Delta
from specpool.openai.text_reader import Steps, TextReader
from specpool.openai.tool_calls import Calls, new_id, new_mistral_id


@dataclass(frozen=True)
class ToolFormat:
    """How calls are read from an answer, and how they are enforced."""

    read: Callable[[TextReader, Calls], Steps[Delta, None]]
    grammar: CallGrammar | None
    """None: enforced calls use `JSON_LIST` instead."""
    new_id: Callable[[], str] = new_id
    reads_reasoning: bool = False
    """Whether `read` also reads the reasoning."""


HERMES = TagGrammar('<tool_call>\n{"name": "{name}", "arguments": ', "}\n</tool_call>", "<tool_call>", "\n")
LLAMA3 = TagGrammar('{"name": "{name}", "parameters": ', "}", '{"name": "')
MISTRAL_ARGS = TagGrammar("[TOOL_CALLS]{name}[ARGS]", "", "[TOOL_CALLS]", "")

FORMATS = {
    "hermes": ToolFormat(call_readers.read_hermes, HERMES),
    "llama3": ToolFormat(call_readers.read_llama3, LLAMA3),
    "mistral": ToolFormat(call_readers.read_mistral, ListGrammar("arguments", "[TOOL_CALLS]"), new_mistral_id),
    "mistral_args": ToolFormat(call_readers.read_mistral_args, MISTRAL_ARGS, new_mistral_id),
    "glm": ToolFormat(call_readers.read_glm, None),
    "qwen3_coder": ToolFormat(call_readers.read_qwen3_coder, None),
    "harmony": ToolFormat(call_readers.read_harmony, HarmonyGrammar(), reads_reasoning=True),
}
JSON_LIST = ToolFormat(call_readers.read_json_list, ListGrammar("parameters"))
CONTENT = ToolFormat(call_readers.read_content, None)
"""An unknown format, or no tools."""
