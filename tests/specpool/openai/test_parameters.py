"""Conversion of plain-text parameters to JSON of the schema's types."""

from typing import Any

import pytest
from read_answers import read, tool

from specpool.openai.output import plan_output
from specpool.v1.generation_pb2 import GetModelInfoResponse

VALUES: list[tuple[Any, str, Any]] = [
    ({"type": "string"}, "5", "5"),
    ({"type": "string"}, '"a"', '"a"'),
    ({"type": "integer"}, " 5 ", 5),
    ({"type": "integer"}, "5.5", "5.5"),
    ({"type": "number"}, "5", 5),
    ({"type": "number"}, "NaN", "NaN"),
    ({"type": "boolean"}, "True", True),
    ({"type": "boolean"}, "false", False),
    ({"type": "null"}, "None", None),
    ({"type": "array"}, '[1, "a"]', [1, "a"]),
    ({"type": "array"}, "[1, ", "[1, "),
    ({"type": "object"}, '{"a": {}}', {"a": {}}),
    ({"type": "object"}, '{"a":' * 5000, '{"a":' * 5000),
    ({"type": ["string", "null"]}, "null", None),
    ({"type": ["string", "null"]}, "true", "true"),
    ({"enum": ["a", 5]}, "5", 5),
    ({"enum": ["a", "5"]}, "5", "5"),
    ({"const": 5}, "5", 5),
    ({"anyOf": [{"type": "string"}, {"type": "integer"}]}, "5", 5),
    ({"oneOf": [{"type": "string"}, {"type": "boolean"}]}, "5", "5"),
    ({"anyOf": [{"type": "string"}, {"$ref": "#/$defs/a"}]}, "5", 5),
    ({}, "5", 5),
    ({}, "five", "five"),
    (True, "[]", []),
    (None, "[]", []),
]


@pytest.mark.parametrize(("schema", "text", "value"), VALUES)
def test_text_becomes_json_of_the_schema_type(schema: Any, text: str, value: Any) -> None:
    properties = {} if schema is None else {"value": schema}
    tools = [tool("f", {"type": "object", "properties": properties})]
    answers = {
        "glm": f"<tool_call>f\n<arg_key>value</arg_key>\n<arg_value>{text}</arg_value>\n</tool_call>",
        "qwen3_coder": f"<function=f>\n<parameter=value>\n{text}\n</parameter>\n</function>",
    }
    for name, answer in answers.items():
        plan = plan_output(GetModelInfoResponse(tool_call_format=name), tools=tools)
        ((_, arguments),) = read(plan, [answer]).parsed_calls
        assert arguments == {"value": value}
        assert type(arguments["value"]) is type(value)
