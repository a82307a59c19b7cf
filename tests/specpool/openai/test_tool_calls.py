"""Parsing of tool calls in each format."""

import json
import re
from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from read_answers import Answer, read, tool
from tool_templates import TEMPLATES

from coordinator.prompts.chat_formats import tool_call_format
from coordinator.prompts.templates import Chat, ChatTemplate
from specpool.openai.deltas import CallArguments, CallStart, Content
from specpool.openai.output import OutputPlan, plan_output
from specpool.v1.generation_pb2 import GetModelInfoResponse, ReasoningTags

FORECAST = {
    "type": "object",
    "properties": {
        "place": {"type": "string"},
        "days": {"type": "integer"},
        "exact": {"type": "boolean"},
        "note": {"type": ["string", "null"]},
        "options": {"type": "object"},
        "limit": {"anyOf": [{"type": "number"}, {"type": "string"}]},
        "anything": {},
    },
}
TOOLS = [tool("forecast", FORECAST), tool("now", None)]
ARGUMENTS = {
    "place": 'Ulm "\u00e9\U0001f600" </tool_call> }\n\n x\\',
    "days": 3,
    "exact": True,
    "note": None,
    "options": {"a": [1, {"b": "}"}]},
    "limit": 2.5,
    "anything": ["x"],
}
FORMATS = sorted(TEMPLATES)
ONE_CALL = ("llama3", "harmony")
# Strings to cut from rendered answers: their beginning is in the prompt, and texts omit end-of-sequence tokens.
PROMPT = re.compile(
    r"<\|im_start\|>assistant\n?|<\|start_header_id\|>assistant<\|end_header_id\|>\n\n|<\|assistant\|>\n?|"
    r"<\|start\|>assistant(?= to)"
)
END = re.compile(r"(<\|im_end\|>\n|<\|eot_id\|>|</s>|<\|call\|>)$")


def plan_for(name: str, tools: Any = TOOLS, reasoning: ReasoningTags | None = None, **options: Any) -> OutputPlan:
    info = GetModelInfoResponse(tool_call_format=name, reasoning=reasoning)
    return plan_output(info, tools=tools, **options)


@cache
def cached_template(name: str) -> ChatTemplate:
    return ChatTemplate(TEMPLATES[name], {})


def written(name: str, content: str | None, *calls: tuple[str, Any]) -> str:
    """Return an answer as the chat template of the format writes it."""
    user = {"role": "user", "content": "Hi"}
    tool_calls = [{"id": "a1b2c3d4e", "type": "function", "function": {"name": f, "arguments": a}} for f, a in calls]
    template = cached_template(name)
    prompt = template.render(Chat([user]), 1e6)
    text = template.render(Chat([user, {"role": "assistant", "content": content, "tool_calls": tool_calls}]), 1e6)
    return END.sub("", PROMPT.sub("", text.removeprefix(prompt), count=1))


@pytest.mark.parametrize("name", FORMATS)
def test_the_server_recognizes_the_format_of_the_template(name: str) -> None:
    assert tool_call_format(TEMPLATES[name]) == name


@pytest.mark.parametrize("name", FORMATS)
def test_calls_are_read_as_the_chat_template_writes_them(name: str) -> None:
    text = written(name, None, ("forecast", ARGUMENTS))
    for chunks in (list(text), [text]):
        answer = read(plan_for(name), chunks)
        assert answer.parsed_calls == [("forecast", ARGUMENTS)]
        assert not answer.content


@pytest.mark.parametrize("name", sorted({*FORMATS} - {*ONE_CALL}))
def test_an_answer_may_have_text_and_several_calls(name: str) -> None:
    content = "" if name == "mistral" else "Let me look."
    text = written(name, content, ("forecast", {"place": "Ulm"}), ("now", {}))
    answer = read(plan_for(name), list(text))
    assert answer.parsed_calls == [("forecast", {"place": "Ulm"}), ("now", {})]
    assert answer.content == content


@pytest.mark.parametrize("name", FORMATS)
def test_arguments_are_read_while_they_arrive(name: str) -> None:
    text = written(name, None, ("forecast", {"place": "x" * 50}))
    reader = plan_for(name).reader(False)
    start, *deltas = reader.feed(text[: text.index("xx") + 20])
    assert isinstance(start, CallStart)
    assert start.name == "forecast"
    assert "".join(delta.text for delta in deltas if isinstance(delta, CallArguments)).endswith("x" * 20)


def test_json_arguments_keep_the_original_text() -> None:
    arguments = '{ "place" :"\\u00dcl\\ud83d\\ude00m",\n"n": 1e1,"n":2}'
    text = f'<tool_call>{{"name":"forecast","arguments":{arguments}}}</tool_call>'
    assert read(plan_for("hermes"), list(text)).calls == [["forecast", arguments]]


@pytest.mark.parametrize(
    ("name", "text", "calls", "content"),
    [
        ("hermes", '<tool_call>\n{"arguments": {"place": "Ulm"}, "id": [1], "name": "now"}\n</tool_call>',
         [["now", '{"place": "Ulm"}']], ""),
        ("hermes", '<tool_call>{"name": "now", "arguments": {}, "id": "1"}</tool_call>.', [["now", "{}"]], "."),
        ("hermes", 'a\n<tool_call>{"name": "now", "arguments": {}}\n</tool_call>\nb\n', [["now", "{}"]], "a\nb\n"),
        ("hermes", '<tool_call>{"name": "now", "arguments": {}}<tool_call>{"name": "now", "arguments": {}}',
         [["now", "{}"]] * 2, ""),
        ("hermes", '<tool_call>{"name": "now", "arguments": {}</tool_call>', [["now", "{}"]], ""),
        ("hermes", '<tool_call>{"name": "now", "arguments": {"a": "x', [["now", '{"a": "x']], ""),
        ("hermes", '<tool_call>{"name": "now", "arguments": {"a": }}</tool_call>', [["now", '{"a": }']], ""),
        ("llama3", '<|python_tag|>{"name": "now", "parameters": {}}', [["now", "{}"]], ""),
        ("llama3", '{"type": "function", "name": "now", "arguments": {}}; {"name": "now", "parameters": {}}',
         [["now", "{}"]] * 2, ""),
        ("llama3", 'Yes: {"name": "now", "parameters": {}}', [], 'Yes: {"name": "now", "parameters": {}}'),
        ("mistral", 'a[TOOL_CALLS][{"name": "now", "arguments": {}}]', [["now", "{}"]], "a"),
        ("mistral", '[TOOL_CALLS]{"name": "now", "arguments": {}}', [["now", "{}"]], ""),
        ("mistral_args", "[TOOL_CALLS]now[CALL_ID]a1b2c3d4e[ARGS]{}", [["now", "{}"]], ""),
        ("mistral_args", "[TOOL_CALLS]now{}", [["now", "{}"]], ""),
        ("glm", "<tool_call>now</tool_call>", [["now", "{}"]], ""),
        ("glm", "<tool_call>forecast<arg_key>days</arg_key><arg_value>3</arg_value></tool_call>",
         [["forecast", '{"days": 3}']], ""),
        ("glm", "<tool_call>forecast\n<arg_key>place</arg_key><arg_value>Ul", [["forecast", '{"place": "Ul']], ""),
        ("glm", "<tool_call>forecast\n<arg_key>pla", [["forecast", '{"pla']], ""),
        ("qwen3_coder", "<function=now>\n</function>", [["now", "{}"]], ""),
        ("qwen3_coder", "<tool_call>\n<function=forecast>\n<parameter=place>\n  a\n\n</parameter>\n</function>\n"
         "</tool_call>",
         [["forecast", '{"place": "  a\\n"}']], ""),
        ("qwen3_coder", "<function=forecast><parameter=days>\nmany\n</parameter></function>",
         [["forecast", '{"days": "many"}']], ""),
        ("qwen3_coder", "<function=forecast><parameter=note>\n5\n</parameter></function>",
         [["forecast", '{"note": "5"}']], ""),
        ("harmony", '<|channel|>commentary to=functions.now <|constrain|>json<|message|>{}', [["now", "{}"]], ""),
        ("harmony", "<|channel|>commentary<|message|>Looking.<|end|><|start|>assistant"
         "<|channel|>commentary to=functions.now <|constrain|>json<|message|>{}", [["now", "{}"]], "Looking."),
        ("harmony", "<|channel|>final<|message|>It is late.", [], "It is late."),
        ("harmony", '{"plain": "json"}', [], '{"plain": "json"}'),
    ],
)  # fmt: skip
def test_variants_that_models_generate(name: str, text: str, calls: list[list[str]], content: str) -> None:
    for chunks in (list(text), [text]):
        assert read(plan_for(name), chunks) == Answer(content, "", calls)


MALFORMED = [
    ("hermes", '<tool_call>{"name": "other", "arguments": {}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "now"}</tool_call>'),
    ("hermes", '<tool_call>{"name": "now", "arguments": "{}"}</tool_call>'),
    ("hermes", '<tool_call>{"name": "now", "arguments": null}</tool_call>'),
    ("hermes", '<tool_call>{"name": 5, "arguments": {}}</tool_call>'),
    ("hermes", "<tool_call>now</tool_call>"),
    ("hermes", '<tool_call>{"name": "no'),
    ("hermes", '<tool_call>{"name": "now", "argum'),
    ("hermes", "<tool_call"),
    ("llama3", '{"name": "other", "parameters": {}}'),
    ("llama3", '{"answer": 42}'),
    ("llama3", "<|python_tag|>print(1)"),
    ("mistral", "[TOOL_CALLS] none"),
    ("mistral", '[TOOL_CALLS][{"name": "other", "arguments": {}}]'),
    ("mistral_args", "[TOOL_CALLS]other[ARGS]{}"),
    ("mistral_args", "[TOOL_CALLS]now[ARGS]5"),
    ("glm", "<tool_call>other<arg_key>a</arg_key><arg_value>5</arg_value></tool_call>"),
    ("glm", "a <tool_call> in a sentence"),
    ("qwen3_coder", "<tool_call>\n<function=other>\n</function>\n</tool_call>"),
    ("qwen3_coder", "<tool_call>\n<function=now"),
    ("harmony", "<|channel|>commentary to=functions.other <|constrain|>json<|message|>{}"),
    ("qwen3_coder", '<function=now>\n{"a": 1}</function>'),
    ("harmony", "<|channel|>analysis Hello<|end|>"),
]


@pytest.mark.parametrize(("name", "text"), MALFORMED)
def test_text_that_is_not_a_tool_call_stays_content(name: str, text: str) -> None:
    for chunks in (list(text), [text]):
        assert read(plan_for(name), chunks) == Answer(text)


def test_the_analysis_channel_of_harmony_is_reasoning() -> None:
    text = (
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>analysis<|message|>Yes.<|end|>"
        "<|start|>assistant<|channel|>commentary<|message|>So:<|end|><|start|>assistant<|channel|>final<|message|>42"
    )
    for tools in (TOOLS, None):
        assert read(plan_for("harmony", tools), list(text)) == Answer("So:\n42", "Hm.\nYes.")


@pytest.mark.parametrize("name", ["hermes", "glm", "qwen3_coder"])
def test_calls_follow_the_reasoning(name: str) -> None:
    plan = plan_for(name, reasoning=ReasoningTags(begin="<think>", end="</think>"))
    call = written(name, None, ("now", {}))
    answer = read(plan, list(f"<think>\nUse {call}?\n</think>\n\n{call}"))
    assert answer == Answer("", f"Use {call}?", [["now", "{}"]])
    assert read(plan, [call], starts_in_reasoning=True) == Answer("", call)


@pytest.mark.parametrize("name", sorted({*FORMATS} - {*ONE_CALL}))
def test_without_parallel_calls_only_the_first_is_read(name: str) -> None:
    text = written(name, None, ("forecast", {"place": "Ulm"}), ("now", {}))
    answer = read(plan_for(name, parallel_tool_calls=False), list(text))
    assert answer.parsed_calls == [("forecast", {"place": "Ulm"})]
    assert not answer.content


@pytest.mark.parametrize("options", [{"tools": None}, {"tool_choice": "none"}])
def test_without_tools_text_is_not_parsed(options: dict[str, Any]) -> None:
    text = written("hermes", "a", ("now", {}))
    assert read(plan_for("hermes", **options), list(text)) == Answer(text)


def test_calls_in_an_unknown_format_are_not_parsed() -> None:
    plan = plan_for("")
    assert plan.skip_special_tokens
    assert read(plan, ["<tool_call>"]) == Answer("<tool_call>")


def test_ids_have_the_form_that_templates_require() -> None:
    for name, pattern in (("hermes", r"call_[0-9a-f]{24}"), ("mistral", r"[0-9a-zA-Z]{9}")):
        text = written(name, None, ("now", {}), ("now", {}))
        starts = [delta for delta in plan_for(name).reader(False).feed(text) if isinstance(delta, CallStart)]
        assert len({start.id for start in starts}) == 2
        assert all(re.fullmatch(pattern, start.id) for start in starts)


def test_content_is_read_as_soon_as_it_cannot_begin_a_call() -> None:
    reader = plan_for("hermes").reader(False)
    assert reader.feed("a <tool") == [Content("a")]
    assert reader.feed("box>") == [Content(" <toolbox>")]


PIECES = [
    "<tool_call>", "</tool_call>", "\n", " ", "{", "}", "[", "]", '"', "\\", ",", ":", "x", "\u00e9", "\U0001f600",
    '{"name": "now", "arguments": {', '"name": ', '"now"', '"arguments": ', '"parameters": ', "now", "forecast", ">",
    "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "<arg_key>", "place", "</arg_key>", "<arg_value>", "</arg_value>", "days",
    "<function=", "<parameter=", "</parameter>", "</function>", "<|channel|>", "<|message|>", "<|end|>", "<|start|>",
    "commentary to=functions.", "analysis", "final", "<|python_tag|>", "<think>", "</think>", "5", "null", ";",
]  # fmt: skip


@pytest.mark.parametrize("name", [*FORMATS, "json_list"])
@given(data=st.data())
@settings(max_examples=60)
def test_answers_do_not_depend_on_their_chunks_and_lose_no_text(name: str, data: st.DataObject) -> None:
    reasoning = data.draw(st.sampled_from([None, ReasoningTags(begin="<think>", end="</think>")]))
    choice = "required" if name == "json_list" else "auto"
    plan = plan_for("" if name == "json_list" else name, reasoning=reasoning, tool_choice=choice)
    text = "".join(data.draw(st.lists(st.sampled_from(PIECES), max_size=25)))
    cuts = sorted(data.draw(st.sets(st.integers(0, len(text)), max_size=8)))
    bounds = list(zip([0, *cuts], [*cuts, len(text)], strict=True))
    starts_inside = data.draw(st.booleans()) and reasoning is not None
    whole = read(plan, [text], starts_inside)
    assert read(plan, list(text), starts_inside) == whole
    assert read(plan, [text[begin:end] for begin, end in bounds], starts_inside) == whole
    everything = whole.reasoning + whole.content + "".join(name + arguments for name, arguments in whole.calls)
    if name != "harmony":  # its headers are dropped
        assert all(everything.count(letter) >= text.count(letter) for letter in "x\u00e9\U0001f600")


SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text()
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
)


@given(VALUES, st.sampled_from(sorted({*FORMATS} - {"glm", "qwen3_coder"})))
@settings(max_examples=50)
def test_any_arguments_survive(value: Any, name: str) -> None:
    arguments = {"value": value}
    answer = read(plan_for(name), list(written(name, None, ("now", arguments))))
    assert answer.parsed_calls == [("now", json.loads(json.dumps(arguments)))]
