"""Measure the speed of constrained answers.

    python -m benchmarks.structured [--prompts FILE] [--concurrencies 1,8] [--repeats 3] [--output FOLDER]

Each line of the prompts is {"id", "messages", "json_schema"}. One service answers all prompts in turns: "plain" without
speculation; "default" with it; and "lookup" with prompt lookup instead of the draft model. The last two also verify
forced tokens. Ratios are taken within a repeat; the table shows medians. An answer is exact if it equals the first
plain answer, and valid if jsonschema accepts it; answers cut off by --max-tokens do not count as valid or invalid. With
--vllm, vLLM for the CPU then answers the same prompts, without speculation and with its own prompt lookup, in the
environment that SPECPOOL_VLLM_PYTHON names.

Exit status 1: an answer was not exact or not valid. The last line printed is JSON.
"""

import argparse
import asyncio
import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import jsonschema
from tokenizers import Tokenizer

from benchmarks.prompts import token_ids
from benchmarks.report import console, finish, median, output_folder, parser_of, progress, show, whole, wholes
from benchmarks.runs import Run, in_turns, ratios, spread
from benchmarks.vllm_process import VllmEngine
from specpool.cli.processes import ProcessFailedError
from specpool.cli.up import running
from specpool.cli.up_settings import UpSettings
from specpool.client import AsyncClient
from specpool.client.prompts import PromptLine
from specpool.client.requests import GenerateOptions
from specpool.engine.models.embedded_pair import float32_copy
from specpool.v1 import generation_pb2 as pb

PROMPTS = Path(__file__).with_name("structured.jsonl")
LOAD = 3
"""Minimum answers of a run, per request in flight."""

PLAIN = "plain"
KINDS: dict[str, GenerateOptions] = {
    PLAIN: {"num_speculative_tokens": 0},
    "default": {},
    "lookup": {"draft_method": "ngram"},
}


@dataclass(frozen=True)
class Question:
    name: str
    messages: list[Any]
    schema: Any


def read_questions(path: Path) -> list[Question]:
    """All questions of a file. OSError, ValueError, KeyError, TypeError: the file is invalid."""
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    if not lines:
        raise ValueError("no prompts")
    return [Question(line["id"], line["messages"], line["json_schema"]) for line in lines]


def is_valid(schema: Any, text: str) -> bool:
    try:
        jsonschema.Draft202012Validator(schema).validate(json.loads(text))
    except (ValueError, jsonschema.ValidationError):
        return False
    return True


async def serve(questions: list[Question], options: argparse.Namespace) -> list[Run]:
    settings = UpSettings(
        port=0, log_level="error", drain_seconds=1, prefix_caching=False, max_num_seqs=max(options.concurrencies)
    )
    console.print("starting the service")
    truth: dict[str, list[int]] = {}
    async with running(settings) as address, AsyncClient(address) as client:
        for kind in KINDS:  # learn the costs of rounds
            await run(client, questions, max(options.concurrencies), kind, options.max_tokens, truth)
        cases = [(concurrency, kind) for concurrency in options.concurrencies for kind in KINDS]

        async def answered(case: tuple[int, str]) -> Run:
            asked = list(islice(cycle(questions), max(len(questions), LOAD * case[0])))
            return await run(client, asked, *case, options.max_tokens, truth)

        runs = await in_turns(cases, options.repeats, answered)
    return [summary(*case, found, runs[case[0], PLAIN]) for case, found in runs.items()]


async def run(
    client: AsyncClient,
    questions: Sequence[Question],
    concurrency: int,
    kind: str,
    max_tokens: int,
    truth: dict[str, list[int]],
) -> Run:
    """Answer all questions once. `truth`: the first answers, by name."""
    free, began = asyncio.Semaphore(concurrency), time.perf_counter()

    async def one(question: Question) -> pb.GenerateResponse:
        async with free:
            options: GenerateOptions = {"json_schema": question.schema, "max_tokens": max_tokens, **KINDS[kind]}
            return await client.generate(question.messages, **options)

    answers = await asyncio.gather(*map(one, questions))
    seconds = time.perf_counter() - began
    same = [
        truth.setdefault(question.name, list(answer.token_ids)) == list(answer.token_ids)
        for question, answer in zip(questions, answers, strict=True)
    ]
    ended = [pair for pair in zip(questions, answers, strict=True) if pair[1].finish_reason == "stop"]
    stats = [answer.speculative_decoding for answer in answers]
    accepted, rounds = sum(each.num_accepted_draft_tokens for each in stats), sum(each.num_spec_steps for each in stats)
    return {
        "tokens_per_s": sum(len(answer.token_ids) for answer in answers) / seconds,
        "acceptance_length": 1 + accepted / rounds if rounds else None,
        "ended": len(ended) / len(answers),
        "valid": statistics.mean(is_valid(question.schema, answer.text) for question, answer in ended)
        if ended
        else 1.0,
        "exact_match": statistics.mean(same),
    }


def summary(concurrency: int, kind: str, runs: list[Run], plain: list[Run]) -> Run:
    """The row of a kind. `plain`: plain runs of the same repeats."""
    row: Run = {"concurrency": concurrency, "kind": kind, "tokens_per_s": round(median(runs, "tokens_per_s") or 0, 1)}
    row |= spread(ratios(runs, plain, "tokens_per_s"))
    length = median(runs, "acceptance_length")
    row["acceptance_length"] = None if length is None else round(length, 2)
    return row | {name: round(min(one[name] for one in runs), 3) for name in ("ended", "valid", "exact_match")}


def peer_rows(questions: list[Question], options: argparse.Namespace) -> list[Run]:
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
                runs = [peer_run(engine, some, concurrency, options.max_tokens) for _ in turns]
                found = {name: round(median(runs[1:], name) or 0, 3) for name in runs[0]}
                rows.append({"concurrency": concurrency, "kind": kind, **found})
    return rows


def peer_run(engine: VllmEngine, asked: list[tuple[Question, list[int]]], concurrency: int, max_tokens: int) -> Run:
    schemas = [question.schema for question, _ in asked]
    found = engine.run([ids for _, ids in asked], max_tokens, concurrency, schemas)
    tokenizer = Tokenizer.from_file(str(float32_copy() / "tokenizer.json"))
    valid = [
        is_valid(question.schema, tokenizer.decode(ids))
        for (question, _), ids in zip(asked, found["outputs"], strict=True)
    ]
    return {"tokens_per_s": sum(map(len, found["outputs"])) / found["seconds"], "valid": statistics.mean(valid)}


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--prompts", type=Path, default=PROMPTS, help="JSONL file; default: the benchmark's own")
    parser.add_argument("--concurrencies", type=wholes(1, 1000), default=[1, 8], metavar="1,8,...")
    parser.add_argument("--max-tokens", type=whole(1, 4000), default=160)
    parser.add_argument("--repeats", type=whole(1, 1000), default=3)
    parser.add_argument("--vllm", action="store_true", help="also measure vLLM")
    parser.add_argument("--output", type=output_folder, help="folder for the result")
    options = parser.parse_args()
    try:
        questions = read_questions(options.prompts)
    except (OSError, ValueError, KeyError, TypeError) as error:
        parser.error(f"--prompts: {error!r}")
    try:
        rows = asyncio.run(serve(questions, options))
        peer = peer_rows(questions, options) if options.vllm else []
    except (ProcessFailedError, OSError, RuntimeError) as error:
        raise SystemExit(str(error)) from None
    show("constrained answers", rows)
    show("vLLM", peer)
    result = {"max_tokens": options.max_tokens, "repeats": options.repeats, "rows": rows, "vllm": peer}
    finish("structured", result, options.output)
    if any(row["exact_match"] < 1 or row["valid"] < 1 for row in rows):
        raise SystemExit("some answers differ from plain decoding, or are invalid")


if __name__ == "__main__":
    main()
