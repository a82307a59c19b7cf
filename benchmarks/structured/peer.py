"""Constrained answers of vLLM for the CPU."""

import argparse
import statistics
from itertools import cycle, islice
from typing import Any

from tokenizers import Tokenizer

from benchmarks.prompts import token_ids
from benchmarks.report import median, progress
from benchmarks.structured.questions import LOAD, Question, is_valid
from benchmarks.vllm_process import VllmEngine
from specpool.client.prompts import PromptLine
from specpool.engine.models.embedded_pair import float32_copy

Row = dict[str, Any]


def peer_rows(questions: list[Question], options: argparse.Namespace) -> list[Row]:
    """A row for each draft method and concurrency. OSError, RuntimeError: vLLM cannot run."""
    target, rows = float32_copy(), []
    lines = [PromptLine(question.name, question.messages) for question in questions]
    asked = list(zip(questions, token_ids(target, lines), strict=True))
    for kind in ("plain", "ngram"):
        with VllmEngine(target, kind, enforce_eager=True) as engine:
            engine.wait_ready()
            for concurrency in options.concurrencies:
                some = list(islice(cycle(asked), max(len(asked), LOAD * concurrency)))
                turns = progress(range(1 + options.repeats), f"vLLM, {kind}, {concurrency} at a time")
                runs = [run(engine, some, concurrency, options.max_tokens) for _ in turns]
                found = {name: round(median(runs[1:], name) or 0, 3) for name in runs[0]}
                rows.append({"concurrency": concurrency, "kind": kind, **found})
    return rows


def run(engine: VllmEngine, asked: list[tuple[Question, list[int]]], concurrency: int, max_tokens: int) -> Row:
    schemas = [question.schema for question, _ in asked]
    found = engine.run([ids for _, ids in asked], max_tokens, concurrency, schemas)
    tokenizer = Tokenizer.from_file(str(float32_copy() / "tokenizer.json"))
    valid = [
        is_valid(question.schema, tokenizer.decode(ids))
        for (question, _), ids in zip(asked, found["outputs"], strict=True)
    ]
    return {"tokens_per_s": sum(map(len, found["outputs"])) / found["seconds"], "valid": statistics.mean(valid)}
