"""Validation of OpenAI's `tools` and `tool_choice`."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")
MAX_NESTING = 32
"""Levels of a schema, as in the coordinator."""
NO_PARAMETERS = {"type": "object", "properties": {}, "additionalProperties": False}


@dataclass(frozen=True)
class Function:
    """A function that the model may call."""

    name: str
    parameters: Mapping[str, Any]
    """JSON Schema of an object."""
    strict: bool
    """Whether the arguments must match the schema even if the model is free to call the function."""


@dataclass(frozen=True)
class ToolChoice:
    """Whether the model may or must call functions. The modes have OpenAI's meaning."""

    mode: Literal["none", "auto", "required"]
    functions: tuple[Function, ...] = ()
    """Functions that may be called."""
    is_named: bool = False
    """Whether the request names the one function to call."""


def read_tool_choice(tools: Any, tool_choice: Any) -> ToolChoice:
    """Validate both fields, as parsed from JSON. Raises ValueError("field: reason")."""
    functions = _read_tools(tools)
    if tool_choice is None:
        tool_choice = "auto" if functions else "none"
    if tool_choice == "none":
        return ToolChoice("none")
    if not functions:
        raise ValueError("tool_choice: requires tools")
    if tool_choice in ("auto", "required"):
        return ToolChoice(tool_choice, functions)
    if not isinstance(tool_choice, dict):
        raise ValueError('tool_choice: must be "none", "auto", "required" or a function')
    name = _read_named(tool_choice)
    named = tuple(function for function in functions if function.name == name)
    if not named:
        raise ValueError(f"tool_choice.function.name: no tool is named {name!r}")
    return ToolChoice("required", named, is_named=True)


def _read_named(tool_choice: dict[str, Any]) -> str:
    if (kind := tool_choice.get("type")) != "function":
        raise ValueError(f'tool_choice.type: {kind!r} is not supported; use "function"')
    function = tool_choice.get("function")
    if not isinstance(function, dict):
        raise ValueError("tool_choice.function: must be an object")
    return _text(function.get("name"), "tool_choice.function.name")


def _read_tools(tools: Any) -> tuple[Function, ...]:
    if tools is None:
        return ()
    if not isinstance(tools, list):
        raise ValueError("tools: must be a list")
    functions = tuple(_read_tool(tool, f"tools[{index}]") for index, tool in enumerate(tools))
    names: set[str] = set()
    for index, function in enumerate(functions):
        if function.name in names:
            raise ValueError(f"tools[{index}].function.name: {function.name!r} is used twice")
        names.add(function.name)
    return functions


def _read_tool(tool: Any, field: str) -> Function:
    if not isinstance(tool, dict):
        raise ValueError(f"{field}: must be an object")
    if (kind := tool.get("type")) != "function":
        raise ValueError(f'{field}.type: {kind!r} is not supported; use "function"')
    function, field = tool.get("function"), f"{field}.function"
    if not isinstance(function, dict):
        raise ValueError(f"{field}: must be an object")
    name = _text(function.get("name"), f"{field}.name")
    if not NAME.fullmatch(name):
        raise ValueError(f"{field}.name: must have 1 to 64 letters, digits, underscores or dashes")
    if function.get("description") is not None:
        _text(function["description"], f"{field}.description")
    if not isinstance(strict := function.get("strict"), bool | None):
        raise ValueError(f"{field}.strict: must be true or false")
    return Function(name, _read_schema(function.get("parameters"), f"{field}.parameters"), bool(strict))


def _read_schema(schema: Any, field: str) -> Mapping[str, Any]:
    if schema is None:
        return NO_PARAMETERS
    if not isinstance(schema, dict):
        raise ValueError(f"{field}: must be a JSON Schema object")
    if schema.get("type", "object") != "object":
        raise ValueError(f'{field}.type: must be "object"')
    if not isinstance(schema.get("properties", {}), dict):
        raise ValueError(f"{field}.properties: must be an object")
    if _is_nested(schema, MAX_NESTING):
        raise ValueError(f"{field}: is nested more than {MAX_NESTING} levels deep")
    return {"type": "object", **schema}


def _is_nested(value: Any, levels: int) -> bool:
    """Return whether objects and lists are nested more than `levels` deep."""
    if not isinstance(value, dict | list):
        return False
    inner = value.values() if isinstance(value, dict) else value
    return levels == 0 or any(_is_nested(each, levels - 1) for each in inner)


def _text(value: Any, field: str) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{field}: must be a string")
    return value
