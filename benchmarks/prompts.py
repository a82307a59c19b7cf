"""The prompts that benchmarks run: a file's, or the small set that comes with Specpool."""

import json
from collections.abc import Iterable
from itertools import zip_longest
from pathlib import Path

from specpool.client.prompts import PromptLine, own_prompts, read_prompts

# Prompts of a run per request in flight, and the fewest prompts of a run.
LOAD, FEWEST_PROMPTS = 2, 4


def number_of_prompts(concurrency: int) -> int:
    """The number of prompts of a run that keeps `concurrency` requests in flight."""
    return max(FEWEST_PROMPTS, LOAD * concurrency)


def load_prompts(path: Path | None, count: int) -> list[PromptLine]:
    """`count` prompts, repeated if there are fewer. A line of the file is as for `specpool generate`, or a question of
    Spec-Bench: {"question_id", "turns"}, of which the first turn is asked."""
    if path is None:
        lines = own_prompts()
    else:
        lines = read_prompts(map(_as_chat, path.read_text(encoding="utf-8").splitlines()))
    return [lines[i % len(lines)] for i in range(count)]


def load_by_category(path: Path | None) -> dict[str, list[PromptLine]]:
    """All prompts of each category, in order. Only questions of Spec-Bench have one; others are in the category ""."""
    if path is None:
        return {"": own_prompts()}
    texts = [text for text in path.read_text(encoding="utf-8").splitlines() if text.strip()]
    found: dict[str, list[PromptLine]] = {}
    for text, line in zip(texts, read_prompts(map(_as_chat, texts)), strict=True):
        found.setdefault(json.loads(text).get("category", ""), []).append(line)
    return found


def in_turn(categories: Iterable[list[PromptLine]]) -> list[PromptLine]:
    """One prompt of each category after the other, for as long as they last."""
    return [line for lines in zip_longest(*categories) for line in lines if line is not None]


def _as_chat(line: str) -> str:
    record = json.loads(line) if line.strip() else {}
    if "turns" not in record:
        return line
    messages = [{"role": "user", "content": record["turns"][0]}]
    return json.dumps({"id": record["question_id"], "messages": messages})
