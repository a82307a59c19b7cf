"""Constrained answers of a service."""

import argparse
import asyncio
import statistics
import time
from collections.abc import Sequence
from itertools import cycle, islice

from benchmarks.report import console, median
from benchmarks.runs import Run, in_turns, ratios, spread
from benchmarks.structured.questions import LOAD, Question, is_valid
from specpool.cli.up import running
from specpool.cli.up_settings import UpSettings
from specpool.client import AsyncClient
from specpool.client.requests import GenerateOptions
from specpool.v1 import generation_pb2 as pb

PLAIN = "plain"
KINDS: dict[str, GenerateOptions] = {
    PLAIN: {"num_speculative_tokens": 0},
    "default": {},
    "lookup": {"draft_method": "ngram"},
}


async def serve(questions: list[Question], options: argparse.Namespace) -> list[Run]:
    """A row for each concurrency and kind."""
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
