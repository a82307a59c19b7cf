"""Validation of tools and tool choices."""

from typing import Any

import pytest
from read_answers import tool

from specpool.openai.tools import read_tool_choice

NOW = tool("now", None)


def test_tool_choice_defaults_to_auto_with_tools() -> None:
    assert read_tool_choice(None, None).mode == "none"
    assert read_tool_choice([], None).mode == "none"
    assert read_tool_choice(None, "none").mode == "none"
    assert read_tool_choice([NOW], None).mode == "auto"
    assert read_tool_choice([NOW], "none").functions == ()


def test_a_function_has_an_object_of_parameters() -> None:
    tools = [NOW, tool("a", {}), tool("b", {"properties": {}}, strict=True, description="b")]
    now, a, b = read_tool_choice(tools, "required").functions
    assert now.parameters["additionalProperties"] is False
    assert a.parameters == {"type": "object"}
    assert (b.parameters, b.strict) == ({"type": "object", "properties": {}}, True)


def test_a_named_function_is_the_only_one() -> None:
    named = {"type": "function", "function": {"name": "a"}}
    choice = read_tool_choice([NOW, tool("a")], named)
    assert [function.name for function in choice.functions] == ["a"]
    assert choice.is_named


DEEP: dict[str, Any] = {}
for _ in range(40):
    DEEP = {"properties": {"a": DEEP}}

REFUSED: list[tuple[Any, Any, str]] = [
    ({}, None, "tools: must be a list"),
    (["now"], None, "tools[0]: must be an object"),
    ([NOW, {"type": "custom"}], None, "tools[1].type: 'custom' is not supported; use \"function\""),
    ([{"type": "function"}], None, "tools[0].function: must be an object"),
    ([tool(5)], None, "tools[0].function.name: must be a string"),  # type: ignore[arg-type]
    ([tool("")], None, "tools[0].function.name: must have 1 to 64 letters, digits, underscores or dashes"),
    ([tool("a b")], None, "tools[0].function.name: must have 1 to 64 letters, digits, underscores or dashes"),
    ([NOW, NOW], None, "tools[1].function.name: 'now' is used twice"),
    ([tool("a", None, description=5)], None, "tools[0].function.description: must be a string"),
    ([tool("a", None, strict="yes")], None, "tools[0].function.strict: must be true or false"),
    ([tool("a", [])], None, "tools[0].function.parameters: must be a JSON Schema object"),
    ([tool("a", {"type": "array"})], None, 'tools[0].function.parameters.type: must be "object"'),
    ([tool("a", {"properties": []})], None, "tools[0].function.parameters.properties: must be an object"),
    ([tool("a", DEEP)], None, "tools[0].function.parameters: is nested more than 32 levels deep"),
    (None, "auto", "tool_choice: requires tools"),
    ([], {"type": "function"}, "tool_choice: requires tools"),
    ([NOW], "always", 'tool_choice: must be "none", "auto", "required" or a function'),
    ([NOW], 5, 'tool_choice: must be "none", "auto", "required" or a function'),
    ([NOW], {"type": "allowed_tools"}, "tool_choice.type: 'allowed_tools' is not supported; use \"function\""),
    ([NOW], {"type": "function"}, "tool_choice.function: must be an object"),
    ([NOW], {"type": "function", "function": {}}, "tool_choice.function.name: must be a string"),
    (
        [NOW],
        {"type": "function", "function": {"name": "a"}},
        "tool_choice.function.name: no tool is named 'a'",
    ),
]


@pytest.mark.parametrize(("tools", "tool_choice", "message"), REFUSED)
def test_refusals_name_the_field(tools: Any, tool_choice: Any, message: str) -> None:
    with pytest.raises(ValueError) as refused:  # noqa: PT011 - the message is compared
        read_tool_choice(tools, tool_choice)
    assert str(refused.value) == message
