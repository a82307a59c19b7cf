"""Prompt files: JSON lines of {"id", "prompt"} or {"id", "messages": [{"role", "content"}, ...]}.

All lines may also have a "prediction", and those with messages "tools" and "chat_template_kwargs".
"""

import json
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Any, cast

from specpool.client.chats import Chat, make_chat
from specpool.client.requests import CHAT_OPTIONS, GenerateOptions


class PromptFileError(ValueError):
    """A line of a prompt file is invalid; the message names it."""


@dataclass(frozen=True)
class PromptLine:
    """One line of a prompt file. `id` is any JSON value."""

    id: object
    prompt: str | Chat
    options: GenerateOptions = field(default_factory=GenerateOptions)
    """Options of this line only."""


def read_prompt_file(path: Path) -> list[PromptLine]:
    """Read the prompts of a file, or of standard input for `-`. Raises OSError or ValueError."""
    if str(path) == "-":
        return read_prompts(read_standard_input().split("\n"))
    with path.open(encoding="utf-8") as file:
        return read_prompts(file)


def read_standard_input() -> str:
    """Read the text of standard input. Raises OSError or UnicodeDecodeError."""
    if sys.stdin is None:
        raise OSError("it is closed")
    return sys.stdin.read()


def read_prompts(lines: Iterable[str]) -> list[PromptLine]:
    """Parse the non-blank lines. Raises PromptFileError."""
    return [_parse(number, line) for number, line in enumerate(lines, 1) if line.strip()]


def reason_of(error: OSError | ValueError) -> str:
    """Return why a text cannot be read, without the path that an OSError includes."""
    if isinstance(error, UnicodeDecodeError):
        return "is not UTF-8"
    return getattr(error, "strerror", None) or str(error)


def own_prompts() -> list[PromptLine]:
    """Return a small built-in set of chat prompts."""
    return read_prompts((files(__package__) / "prompts.jsonl").read_text(encoding="utf-8").splitlines())


def _parse(number: int, line: str) -> PromptLine:
    record = _record(number, line)
    is_chat = "messages" in record
    allowed = {"id", "messages", "prediction", *CHAT_OPTIONS} if is_chat else {"id", "prompt", "prediction"}
    if unknown := record.keys() - allowed:
        raise PromptFileError(f"line {number}: unknown key {', '.join(map(json.dumps, sorted(unknown)))}")
    for name in ("prompt", "prediction"):
        if name in record and not isinstance(record[name], str):
            raise PromptFileError(f'line {number}: "{name}" must be a string')
    prediction = {name: record[name] for name in ("prediction",) if name in record}
    if not is_chat:
        return PromptLine(record["id"], record["prompt"], cast(GenerateOptions, prediction))
    if not isinstance(record["messages"], list):
        raise PromptFileError(f'line {number}: "messages" must be a list')
    options = {name: record[name] for name in CHAT_OPTIONS if name in record}
    try:
        make_chat(record["messages"], **options)
    except TypeError as error:
        raise PromptFileError(f"line {number}: {error}") from None
    return PromptLine(record["id"], record["messages"], cast(GenerateOptions, options | prediction))


def _record(number: int, line: str) -> dict[str, Any]:
    try:
        record = json.loads(line)
        # Python accepts lone surrogates and NaN, which are invalid JSON.
        json.dumps(record, ensure_ascii=False, allow_nan=False).encode()
    except UnicodeEncodeError:
        raise PromptFileError(f"line {number}: has a lone surrogate") from None
    except ValueError as error:
        raise PromptFileError(f"line {number}: not JSON ({error})") from None
    except RecursionError:
        raise PromptFileError(f"line {number}: nested too deeply") from None
    if not isinstance(record, dict) or "id" not in record or ("prompt" in record) == ("messages" in record):
        raise PromptFileError(f'line {number}: must be an object with "id" and either "prompt" or "messages"')
    return record
