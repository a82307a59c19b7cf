"""Parse calls whose parameters are plain text between tags. Values become JSON of the schema's types."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from specpool.openai.deltas import CallArguments, Delta
from specpool.openai.text_reader import Steps, TextReader
from specpool.openai.tool_calls import Calls

PYTHON_LITERALS = {"True": "true", "False": "false", "None": "null"}
"""Chat templates render JSON literals in Python's notation."""
TYPES = {str: "string", bool: "boolean", int: "integer", float: "number", dict: "object", list: "array"}


@dataclass(frozen=True)
class Markup:
    """The tags around parameter names and values."""

    name_begin: str
    name_end: str
    value_begins: tuple[str, ...]
    value_ends: tuple[str, ...]
    end: str
    """Ends the parameters."""


def read_parameters(text: TextReader, calls: Calls, schema: Mapping[str, Any], markup: Markup) -> Steps[Delta, None]:
    """Read a call's parameters as they arrive. If the text ends within the call, its JSON stays open."""
    separator = "{"
    while True:
        yield from text.skip_all()
        tag = yield from text.skip(markup.name_begin, markup.end)
        if tag != markup.name_begin:
            break
        name, end = yield from text.collect_until(markup.name_end)
        quoted = json.dumps(name, ensure_ascii=False)
        if end is None:
            yield calls.arguments(separator + quoted[:-1])
            return
        yield calls.arguments(f"{separator}{quoted}: ")
        yield from text.skip(*markup.value_begins)
        if not (yield from _read_value(text, calls, _types_of(schema.get("properties", {}).get(name)), markup)):
            return
        separator = ", "
    if separator == "{":
        yield calls.arguments("{")
    if tag or not text.is_at_end:
        yield calls.arguments("}")


def _read_value(text: TextReader, calls: Calls, types: set[str] | None, markup: Markup) -> Steps[Delta, bool]:
    """Read a value that has one of `types`, or any type if None. Returns False if the text ends within it."""
    if types == {"string"}:

        def escaped(piece: str) -> CallArguments:
            return calls.arguments(json.dumps(piece, ensure_ascii=False)[1:-1])

        yield calls.arguments('"')
        end = yield from text.until(escaped, *markup.value_ends)
        if end:
            yield calls.arguments('"')
    else:
        value, end = yield from text.collect_until(*markup.value_ends)
        yield calls.arguments(_converted(value, types) if end else value)
    return end is not None


def _types_of(schema: Any) -> set[str] | None:
    """Return the JSON types that a parameter's schema allows, or None if it allows any."""
    if not isinstance(schema, Mapping):
        return None
    if isinstance(types := schema.get("type"), str):
        return {types}
    if isinstance(types, list):
        return {name for name in types if isinstance(name, str)}
    if isinstance(values := schema.get("enum"), list):
        return {_type_of(value) for value in values}
    branches = schema.get("anyOf", schema.get("oneOf"))
    if not isinstance(branches, list):
        return {_type_of(schema["const"])} if "const" in schema else None
    types_of_branches = [_types_of(branch) for branch in branches]
    return None if None in types_of_branches else {name for types in types_of_branches for name in types or ()}


def _type_of(value: Any) -> str:
    return TYPES.get(type(value), "null")


def _converted(value: str, types: set[str] | None) -> str:
    """Convert a parameter's text to JSON of one of `types`, or to a string if it fits none."""
    literal = PYTHON_LITERALS.get(value.strip(), value.strip())
    try:
        kind = _type_of(json.loads(literal, parse_constant=_refuse_constant))
    except (ValueError, RecursionError):
        kind = "string"
    is_allowed = types is None or kind in types or (kind == "integer" and "number" in types)
    return literal if is_allowed and kind != "string" else json.dumps(value, ensure_ascii=False)


def _refuse_constant(name: str) -> None:
    raise ValueError(name)
