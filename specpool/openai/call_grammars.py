"""Constraints that make a model call functions, as fields of `SamplingParams`."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from specpool.openai.tools import Function

Fields = Mapping[str, Any]
ANY_OBJECT = {"type": "object"}
COMPACT = {"x-guidance": {"whitespace_flexible": False, "coerce_one_of": False, "lenient": False}}
"""llguidance options that the coordinator sets itself in every constraint except `grammar`."""


class CallGrammar(Protocol):
    """Builds the constraints of a tool call format."""

    def required(self, functions: Sequence[Function], parallel: bool) -> Fields:
        """Return the constraint of an answer that consists of a call, or of several if `parallel`."""

    def strict(self, functions: Sequence[Function], parallel: bool) -> Fields:
        """Return the constraint of free text with calls whose arguments match the schemas of strict functions."""


@dataclass(frozen=True)
class TagGrammar:
    """Calls whose arguments are JSON between fixed strings."""

    begin: str
    """Contains {name}."""
    end: str
    trigger: str
    """String that begins every call and occurs nowhere else."""
    separator: str | None = None
    """String between two calls. None if an answer has at most one."""

    def required(self, functions: Sequence[Function], parallel: bool) -> Fields:
        """Return a structural tag that allows calls only."""
        tags = [self._tag(function, function.parameters) for function in functions]
        return _structural_tag(
            type="tags_with_separator",
            tags=tags,
            separator=self.separator or "",
            at_least_one=True,
            stop_after_first=not parallel or self.separator is None,
        )

    def strict(self, functions: Sequence[Function], parallel: bool) -> Fields:
        """Return a structural tag that allows calls in free text."""
        tags = [self._tag(f, f.parameters if f.strict else ANY_OBJECT) for f in functions]
        return _structural_tag(type="triggered_tags", triggers=[self.trigger], tags=tags, stop_after_first=not parallel)

    def _tag(self, function: Function, schema: Mapping[str, Any]) -> dict[str, Any]:
        return _tag(self.begin.replace("{name}", function.name), schema, self.end)


@dataclass(frozen=True)
class ListGrammar:
    """Calls as a JSON list."""

    key: str
    """The key of a call's arguments."""
    begin: str = ""
    """String before the list, which occurs nowhere else. Empty if there is none."""

    def required(self, functions: Sequence[Function], parallel: bool) -> Fields:
        """Return the schema of the list, in a structural tag if `begin` precedes it."""
        schema = self._schema([(f.name, f.parameters) for f in functions], parallel)
        if not self.begin:
            return {"json_schema": json.dumps(schema)}
        tags = [_tag(self.begin, schema)]
        return _structural_tag(type="tags_with_separator", tags=tags, at_least_one=True, stop_after_first=True)

    def strict(self, functions: Sequence[Function], parallel: bool) -> Fields:
        """Return a structural tag that allows a list in free text."""
        if not self.begin:
            return {}
        schema = self._schema([(f.name, f.parameters if f.strict else ANY_OBJECT) for f in functions], parallel)
        tags = [_tag(self.begin, schema)]
        return _structural_tag(type="triggered_tags", triggers=[self.begin], tags=tags, stop_after_first=True)

    def _schema(self, functions: Iterable[tuple[str, Mapping[str, Any]]], parallel: bool) -> dict[str, Any]:
        calls = [
            {
                "type": "object",
                "properties": {
                    "name": {"const": name},
                    self.key: _rebased(schema, f"#/items/anyOf/{index}/properties/{self.key}"),
                },
                "required": ["name", self.key],
                "additionalProperties": False,
            }
            for index, (name, schema) in enumerate(functions)
        ]
        limits = {"minItems": 1} if parallel else {"minItems": 1, "maxItems": 1}
        return {"type": "array", "items": {"anyOf": calls}, **limits}


@dataclass(frozen=True)
class HarmonyGrammar:
    """Calls as messages addressed to a function. The model may reason first."""

    def required(self, functions: Sequence[Function], parallel: bool) -> Fields:
        """Return a Lark grammar, because the reasoning and the call are separate messages."""
        calls = " | ".join(
            f'"commentary to=functions.{function.name} " <|constrain|> "json" <|message|> '
            f"%json {json.dumps({**function.parameters, **COMPACT})}"
            for function in functions
        )
        return {
            "grammar": "%llguidance {}\n"
            f"start: (<|channel|> analysis)? <|channel|> ({calls})\n"
            'analysis: "analysis" <|message|> TEXT <|end|> <|start|> "assistant"\n'
            "TEXT: /(.|\\n)*/\n",
            "constraint_after_reasoning": False,
        }

    def strict(self, functions: Sequence[Function], parallel: bool) -> Fields:
        """Return no constraint: free text cannot contain message headers."""
        return {}


def _structural_tag(**form: Any) -> Fields:
    return {"structural_tag": json.dumps({"type": "structural_tag", "format": form})}


def _tag(begin: str, schema: Mapping[str, Any], end: str = "") -> dict[str, Any]:
    return {"begin": begin, "content": {"type": "json_schema", "json_schema": schema}, "end": end}


def _rebased(schema: Any, path: str) -> Any:
    """Return a schema whose local references still resolve when it is embedded at `path`."""
    if isinstance(schema, Mapping):
        rebased = {key: _rebased(value, path) for key, value in schema.items()}
        target = schema.get("$ref")
        if isinstance(target, str) and target.startswith("#"):
            rebased["$ref"] = path + target[1:]
        return rebased
    return [_rebased(value, path) for value in schema] if isinstance(schema, list) else schema
