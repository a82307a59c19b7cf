"""Prompts with schemas, and the check of their answers."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jsonschema
from llguidance import grammar_from

PROMPTS = Path(__file__).with_name("prompts.jsonl")
LOAD = 3
"""Minimum answers of a run, per request in flight."""


@dataclass(frozen=True)
class Question:
    """A prompt and the schema of its answer."""

    name: str
    messages: list[Any]
    schema: Any

    @property
    def grammar(self) -> str:
        """The grammar that workers get."""
        return grammar_from("json_schema", json.dumps(self.schema))


def read_questions(path: Path) -> list[Question]:
    """All questions of a file. OSError, ValueError, KeyError, TypeError: the file is invalid."""
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    if not lines:
        raise ValueError("no prompts")
    return [Question(line["id"], line["messages"], line["json_schema"]) for line in lines]


def is_valid(schema: Any, text: str) -> bool:
    """Whether a complete answer is valid under its schema."""
    try:
        jsonschema.Draft202012Validator(schema).validate(json.loads(text))
    except (ValueError, jsonschema.ValidationError):
        return False
    return True
