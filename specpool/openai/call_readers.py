"""Parsers for answers with tool calls, one per format. Text that does not call a known function is content."""

import re
import string
from collections.abc import Callable

from specpool.openai.deltas import Content, Delta, Reasoning
from specpool.openai.json_calls import read_arguments, read_json_call
from specpool.openai.parameters import Markup, read_parameters
from specpool.openai.text_reader import WHITESPACE, Steps, TextReader
from specpool.openai.tool_calls import Calls

NAME_CHARACTERS = f"{string.ascii_letters}{string.digits}_-"

GLM = Markup("<arg_key>", "</arg_key>", ("\n<arg_value>", "<arg_value>"), ("</arg_value>",), "</tool_call>")
QWEN3_CODER = Markup("<parameter=", ">", ("\n",), ("\n</parameter>", "</parameter>"), "</function>")

TURN, CHANNEL, MESSAGE = "<|start|>", "<|channel|>", "<|message|>"
MESSAGE_ENDS = ("<|end|>", "<|call|>", "<|return|>")
RECIPIENT = re.compile(r"\bto=functions\.([\w-]+)")


def read_content(text: TextReader, _: Calls) -> Steps[Delta, None]:
    """Read an answer without calls."""
    yield from text.until(Content)


def read_hermes(text: TextReader, calls: Calls) -> Steps[Delta, None]:
    """Read `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`."""
    while not calls.are_complete and (tag := (yield from text.until(Content, "<tool_call>"))):
        text.mark()
        yield from text.skip_all()
        if (yield from read_json_call(text, calls, "arguments")):
            yield from text.skip_all()
            yield from text.skip("</tool_call>")
        else:
            yield Content(tag + text.since_mark())


def read_llama3(text: TextReader, calls: Calls) -> Steps[Delta, None]:
    """Read `{"name": ..., "parameters": {...}}` at the beginning of the answer, or after `<|python_tag|>`."""
    tag: str | None = ""
    while not calls.are_complete and tag is not None:
        text.mark()
        yield from text.skip_all()
        if (yield from read_json_call(text, calls, "parameters", "arguments")):
            yield from text.skip_all(f"{WHITESPACE};")
            tag = (yield from text.skip("<|python_tag|>")) or ""
        else:
            yield Content(tag + text.since_mark())
            tag = yield from text.until(Content, "<|python_tag|>")


def read_mistral(text: TextReader, calls: Calls) -> Steps[Delta, None]:
    """Read `[TOOL_CALLS][{"name": ..., "arguments": {...}}, ...]`."""
    while not calls.are_complete and (tag := (yield from text.until(Content, "[TOOL_CALLS]"))):
        yield from _read_list(text, calls, tag, "arguments")


def read_mistral_args(text: TextReader, calls: Calls) -> Steps[Delta, None]:
    """Read `[TOOL_CALLS]name[ARGS]{...}`, also with a `[CALL_ID]`."""
    while not calls.are_complete and (tag := (yield from text.until(Content, "[TOOL_CALLS]"))):
        text.mark()
        name = yield from text.skip_all(NAME_CHARACTERS)
        if (yield from text.skip("[CALL_ID]")):
            yield from text.skip_all(NAME_CHARACTERS)
        yield from text.skip("[ARGS]")
        yield from text.skip_all()
        if name in calls.schemas and (yield from text.skip("{")):
            yield calls.start(name)
            yield from read_arguments(text, calls)
        else:
            yield Content(tag + text.since_mark())


def read_json_list(text: TextReader, calls: Calls) -> Steps[Delta, None]:
    """Read `[{"name": ..., "parameters": {...}}, ...]`, as the constraint of formats without a tag grammar requires."""
    yield from _read_list(text, calls, "", "parameters")
    yield from text.until(Content)


def read_glm(text: TextReader, calls: Calls) -> Steps[Delta, None]:
    """Read `<tool_call>name<arg_key>...</arg_key><arg_value>...</arg_value></tool_call>`."""
    while not calls.are_complete and (tag := (yield from text.until(Content, "<tool_call>"))):
        text.mark()
        yield from text.skip_all()
        name = yield from text.skip_all(NAME_CHARACTERS)
        yield from text.skip_all()
        if name in calls.schemas and (yield from text.peek()) in ("<", ""):
            yield calls.start(name)
            yield from read_parameters(text, calls, calls.schemas[name], GLM)
        else:
            yield Content(tag + text.since_mark())


def read_qwen3_coder(text: TextReader, calls: Calls) -> Steps[Delta, None]:
    """Read `<tool_call><function=name><parameter=...>...</parameter></function></tool_call>`, also without the tags."""
    while not calls.are_complete and (tag := (yield from text.until(Content, "<tool_call>", "<function="))):
        text.mark()
        if tag == "<tool_call>":
            yield from text.skip_all()
            yield from text.skip("<function=")
        name = yield from text.skip_all(NAME_CHARACTERS)
        is_begun = yield from text.skip(">")
        yield from text.skip_all()
        if name in calls.schemas and is_begun and (yield from text.peek()) in ("<", ""):
            yield calls.start(name)
            yield from read_parameters(text, calls, calls.schemas[name], QWEN3_CODER)
            yield from text.skip_all()
            yield from text.skip("</tool_call>")
        else:
            yield Content(tag + text.since_mark())


def read_harmony(text: TextReader, calls: Calls) -> Steps[Delta, None]:
    """Read messages such as `<|channel|>commentary to=functions.name <|constrain|>json<|message|>{...}<|call|>`.

    Messages on the analysis channel are reasoning. The first header may begin in the prompt. A newline separates
    messages of the same kind.
    """
    seen: set[type[Content | Reasoning]] = set()
    opening = yield from text.skip(" to=functions.", TURN, CHANNEL)
    while not calls.are_complete and (opening or (opening := (yield from text.until(Content, TURN, CHANNEL)))):
        header, end = yield from text.collect_until(MESSAGE, *MESSAGE_ENDS)
        header = f"{opening}{header}"
        if end in MESSAGE_ENDS:
            yield Content(f"{header}{end}")
            opening = None
            continue
        recipient = RECIPIENT.search(header)
        if recipient and end:
            text.mark()
            yield from text.skip_all()
            if recipient[1] in calls.schemas and (yield from text.skip("{")):
                yield calls.start(recipient[1])
                yield from read_arguments(text, calls)
            else:
                yield Content(header + end + text.since_mark())
        kind = Reasoning if f"{CHANNEL}analysis" in header else Content
        if kind in seen:
            yield kind("\n")
        seen.add(kind)
        wrap: Callable[[str], Delta] = kind
        end = yield from text.until(wrap, *MESSAGE_ENDS, TURN, CHANNEL)
        opening = None if end in MESSAGE_ENDS else end


def _read_list(text: TextReader, calls: Calls, tag: str, *keys: str) -> Steps[Delta, None]:
    """Read a JSON list of calls, with or without brackets. `tag`: the skipped string before it."""
    separator: str | None = ","
    while separator == "," and not calls.are_complete:
        text.mark()
        yield from text.skip_all(f"{WHITESPACE}[")
        if not (yield from read_json_call(text, calls, *keys)):
            yield Content(tag + text.since_mark())
            return
        tag = ""
        yield from text.skip_all()
        separator = yield from text.skip(",", "]")
