"""Prompts for the benchmarks, from a file or from the small set that Specpool includes."""

import argparse
import json
from collections.abc import Callable, Iterable
from itertools import cycle, islice, zip_longest
from pathlib import Path
from typing import Any, TypeVar

from specpool.client.prompts import PromptLine, own_prompts, read_prompts
from specpool.engine.models.tokenizer import load_tokenizer

T = TypeVar("T")
LOAD, MIN_PROMPTS = 2, 4
"""Prompts of a run: per request in flight, and the minimum."""


def add_prompts(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--prompts", type=Path, help="JSONL file; default: the prompts that come with Specpool")


def checked(parser: argparse.ArgumentParser, read: Callable[[], T]) -> T:
    """Return what `read` finds in the file of prompts. If the file is invalid, end the program."""
    try:
        return read()
    except (OSError, ValueError, LookupError, TypeError) as error:
        parser.error(f"--prompts: {error}")


def number_of_prompts(concurrency: int) -> int:
    return max(MIN_PROMPTS, LOAD * concurrency)


def load_prompts(path: Path | None, count: int) -> list[PromptLine]:
    """`count` prompts, repeated if there are fewer.

    Each line has the format of `specpool generate`, or is a Spec-Bench question: {"question_id", "turns"}. The first
    turn becomes the prompt. OSError, ValueError, LookupError, TypeError: the file is invalid.
    """
    lines = own_prompts() if path is None else _read(path.read_text(encoding="utf-8").splitlines())
    return list(islice(cycle(lines), count))


def load_by_category(path: Path | None) -> dict[str, list[PromptLine]]:
    """All prompts by Spec-Bench category; the category of other prompts is ""."""
    if path is None:
        return {"": own_prompts()}
    texts = [text for text in path.read_text(encoding="utf-8").splitlines() if text.strip()]
    found: dict[str, list[PromptLine]] = {}
    for text, line in zip(texts, _read(texts), strict=True):
        found.setdefault(json.loads(text).get("category", ""), []).append(line)
    return found


def in_turn(categories: Iterable[list[PromptLine]]) -> list[PromptLine]:
    """The first prompt of every category, then the second, and so on."""
    return [line for lines in zip_longest(*categories) for line in lines if line is not None]


def token_ids(model: Path, lines: list[PromptLine]) -> list[list[int]]:
    """Token ids of texts, or of conversations in the model's chat template."""
    tokenizer: Any = load_tokenizer(str(model))
    return [
        list(tokenizer(line.prompt).input_ids)
        if isinstance(line.prompt, str)
        else list(tokenizer.apply_chat_template(line.prompt, add_generation_prompt=True, return_dict=False))
        for line in lines
    ]


def _read(texts: list[str]) -> list[PromptLine]:
    lines = read_prompts(map(_as_chat, texts))
    if not lines:
        raise ValueError("the file has no prompts")
    if any(line.options for line in lines):
        raise ValueError("benchmarks take no predictions, tools or options of chat templates")
    return lines


def _as_chat(line: str) -> str:
    record = json.loads(line) if line.strip() else {}
    if "turns" not in record:
        return line
    messages = [{"role": "user", "content": record["turns"][0]}]
    return json.dumps({"id": record["question_id"], "messages": messages})
