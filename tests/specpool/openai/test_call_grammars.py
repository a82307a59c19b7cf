"""Constraints that enforce tool calls: llguidance allows calls only, and every allowed answer parses as calls."""

from functools import cache
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLTokenizer
from read_answers import Answer, read, tool
from tool_templates import TEMPLATES

from coordinator.prompts.constraints import compile_constraint
from specpool.openai.output import OutputPlan, plan_output
from specpool.protocol.grammars import compile_grammar, load_grammar_tokenizer
from specpool.protocol.tokenizer import TokenizerFiles
from specpool.testing import EOS_TOKEN_ID, VOCAB_SIZE, byte_tokenizer
from specpool.v1.generation_pb2 import GetModelInfoResponse, ReasoningTags

SPECIAL = ("[TOOL_CALLS]", "[ARGS]", "<|start|>", "<|channel|>", "<|message|>", "<|constrain|>", "<|end|>")
FORECAST = {
    "type": "object",
    "properties": {"days": {"$ref": "#/$defs/days"}, "unit": {"enum": ["C", "F"]}},
    "required": ["days", "unit"],
    "additionalProperties": False,
    "$defs": {"days": {"type": "integer", "minimum": 1, "maximum": 9}},
}
TOOLS = [tool("now", None), tool("forecast", FORECAST)]
FORMATS = [*sorted(TEMPLATES), ""]
CALLS = {
    "hermes": '<tool_call>\n{"name": "forecast", "arguments": {"days":3,"unit":"C"}}\n</tool_call>',
    "llama3": '{"name": "forecast", "parameters": {"days":3,"unit":"C"}}',
    "mistral": '[TOOL_CALLS][{"name":"forecast","arguments":{"days":3,"unit":"C"}}]',
    "mistral_args": '[TOOL_CALLS]forecast[ARGS]{"days":3,"unit":"C"}',
    "harmony": '<|channel|>commentary to=functions.forecast <|constrain|>json<|message|>{"days":3,"unit":"C"}',
    "": '[{"name":"forecast","parameters":{"days":3,"unit":"C"}}]',
}
CALLS |= dict.fromkeys(("glm", "qwen3_coder"), CALLS[""])
FORECASTS = [("forecast", {"days": 3, "unit": "C"})]


@cache
def tokenizer() -> LLTokenizer:
    library = byte_tokenizer()
    library.add_special_tokens(list(SPECIAL))
    files = TokenizerFiles(library.to_str().encode(), "", {}, (EOS_TOKEN_ID,))
    return load_grammar_tokenizer(files, VOCAB_SIZE + len(SPECIAL))


@cache
def compiled(kind: str, text: str) -> str:
    return compile_constraint(tokenizer(), kind, text)


def matcher_of(plan: OutputPlan) -> Any:
    [(kind, text)] = [item for item in plan.constraint.items() if item[0] != "constraint_after_reasoning"]
    return compile_grammar(tokenizer(), compiled(kind, text))


def allows(plan: OutputPlan, text: str) -> bool:
    """Whether a text is a whole answer."""
    matcher = matcher_of(plan)
    token_ids = tokenizer().tokenize_str(text, parse_special=True)
    return matcher.try_consume_tokens(token_ids) == len(token_ids) and matcher.is_accepting()


def plan_for(name: str, tools: Any = TOOLS, tool_choice: Any = "required", **options: Any) -> OutputPlan:
    info = GetModelInfoResponse(tool_call_format=name)
    return plan_output(info, tools=tools, tool_choice=tool_choice, **options)


@pytest.mark.parametrize("name", FORMATS)
def test_a_required_call_must_match_its_schema(name: str) -> None:
    plan, call = plan_for(name), CALLS[name]
    assert allows(plan, call)
    assert read(plan, list(call)).parsed_calls == FORECASTS
    for wrong in ("", "Hi", call.replace("3", "0"), call.replace("forecast", "other"), f"Hi {call}", call[:-1]):
        assert not allows(plan, wrong)


@pytest.mark.parametrize("name", FORMATS)
def test_a_named_function_is_called_once(name: str) -> None:
    named = {"type": "function", "function": {"name": "forecast"}}
    plan, call = plan_for(name, tool_choice=named), CALLS[name]
    assert allows(plan, call)
    assert not allows(plan, call.replace("forecast", "now").replace('"days":3,"unit":"C"', ""))
    assert not any(allows(plan, call + separator + call) for separator in ("", "\n", ","))


@pytest.mark.parametrize("name", FORMATS)
def test_parallel_calls_are_allowed_unless_the_request_forbids_them(name: str) -> None:
    call = CALLS[name]
    two = {"hermes": f"{call}\n{call}", "mistral_args": call + call}.get(name)
    if call.endswith("]"):
        begin = call.index("[{") + 1
        two = f"{call[:-1]},{call[begin:]}"
    if two is not None:
        assert allows(plan_for(name), two)
        assert not allows(plan_for(name, parallel_tool_calls=False), two)
        assert read(plan_for(name), list(two)).parsed_calls == FORECASTS * 2


def test_harmony_may_reason_before_a_required_call() -> None:
    text = f"<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant{CALLS['harmony']}"
    info = GetModelInfoResponse(
        tool_call_format="harmony", reasoning=ReasoningTags(begin="<|channel|>analysis<|message|>", end="<|end|>")
    )
    plan = plan_output(info, tools=TOOLS, tool_choice="required")
    assert plan.constraint["constraint_after_reasoning"] is False
    assert allows(plan, text)
    assert read(plan, list(text)) == Answer("", "Hm.", [["forecast", '{"days":3,"unit":"C"}']])


def test_required_calls_follow_the_reasoning() -> None:
    info = GetModelInfoResponse(tool_call_format="hermes", reasoning=ReasoningTags(begin="<think>", end="</think>"))
    for choice, after in (("required", True), ("auto", None)):
        plan = plan_output(info, tools=TOOLS, tool_choice=choice)
        assert plan.constraint.get("constraint_after_reasoning") is after


STRICT = [tool("now", None), tool("forecast", FORECAST, strict=True), tool("free", FORECAST)]


@pytest.mark.parametrize("name", ["hermes", "llama3", "mistral", "mistral_args"])
def test_strict_functions_are_called_with_valid_arguments_only(name: str) -> None:
    plan, call = plan_for(name, STRICT, "auto"), CALLS[name]
    free = call.replace("forecast", "free")
    for text in ("It rains.", call, call.replace("3", "9"), free, free.replace("3", "0")):
        assert allows(plan, text), text
    for text in (call.replace("3", "0"), call.replace("forecast", "other")):
        assert not allows(plan, text), text
    if name != "llama3":
        assert allows(plan, f"Let me look. {call}")


@pytest.mark.parametrize("name", FORMATS)
def test_calls_that_the_model_may_make_are_not_constrained(name: str) -> None:
    assert not plan_for(name, TOOLS, "auto").constraint
    assert not plan_for(name, STRICT, "none").constraint
    if name in ("", "glm", "qwen3_coder", "harmony"):
        assert not plan_for(name, STRICT, "auto").constraint


def answer_of(plan: OutputPlan, random: Random) -> str:
    """Return a random answer that a constraint allows."""
    matcher, token_ids = matcher_of(plan), []
    while True:
        mask = int.from_bytes(matcher.compute_bitmask(), "little")
        allowed = [token_id for token_id in range(VOCAB_SIZE + len(SPECIAL)) if mask >> token_id & 1]
        ending = [token_id for token_id in allowed if token_id == EOS_TOKEN_ID]
        token_id = random.choice(ending or allowed)
        if token_id == EOS_TOKEN_ID:
            return tokenizer().decode_str(token_ids)
        matcher.consume_token(token_id)
        token_ids.append(token_id)


@pytest.mark.parametrize("name", FORMATS)
@given(st.integers(0, 10_000))
@settings(max_examples=10)
def test_every_answer_that_is_allowed_is_read_as_calls(name: str, seed: int) -> None:
    plan = plan_for(name)
    text = answer_of(plan, Random(seed))
    answer = read(plan, [text])
    assert not answer.content
    for function, arguments in answer.parsed_calls:
        assert function in ("now", "forecast")
        assert function == "now" or 1 <= arguments["days"] <= 9
    assert answer.calls
