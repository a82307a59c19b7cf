"""Prompts from a JSONL file: a line is {"id", "prompt"} or {"id", "messages": [{"role", "content"}, ...]}."""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.resources import files

from coordinator.client import Prompt


class PromptFileError(ValueError):
    """A line is not what it must be; the message names it."""


@dataclass(frozen=True)
class PromptLine:
    """One line. `id` is any JSON value, and is returned as it came."""

    id: object
    prompt: Prompt


def read_prompts(lines: Iterable[str]) -> list[PromptLine]:
    """All lines that are not blank. PromptFileError."""
    return [_parse(number, line) for number, line in enumerate(lines, 1) if line.strip()]


def own_prompts() -> list[PromptLine]:
    """A small set of chat prompts that comes with Specpool."""
    return read_prompts((files(__package__) / "prompts.jsonl").read_text(encoding="utf-8").splitlines())


def _parse(number: int, line: str) -> PromptLine:
    try:
        record = json.loads(line)
    except ValueError as error:
        raise PromptFileError(f"line {number}: not JSON ({error})") from None
    if not isinstance(record, dict) or "id" not in record or ("prompt" in record) == ("messages" in record):
        raise PromptFileError(f'line {number}: must be an object with "id" and either "prompt" or "messages"')
    if "prompt" in record:
        if not isinstance(record["prompt"], str):
            raise PromptFileError(f'line {number}: "prompt" must be a string')
        return PromptLine(record["id"], record["prompt"])
    messages = record["messages"]
    if not isinstance(messages, list) or not all(map(_is_message, messages)):
        raise PromptFileError(f'line {number}: "messages" must be a list of {{"role": string, "content": string}}')
    return PromptLine(record["id"], messages)


def _is_message(message: object) -> bool:
    return isinstance(message, dict) and all(isinstance(message.get(key), str) for key in ("role", "content"))
