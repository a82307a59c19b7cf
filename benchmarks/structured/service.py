"""Constrained answers of a service, and an unconstrained stream beside them."""

import argparse
import asyncio
import json
import statistics
import time
from collections.abc import Sequence
from contextlib import suppress
from itertools import count, cycle, islice, pairwise
from typing import Any

from benchmarks.report import console, median, percentile, progress
from benchmarks.structured.questions import LOAD, Question, is_valid
from specpool.cli.up import running
from specpool.cli.up_settings import UpSettings
from specpool.client import AsyncClient
from specpool.client.requests import GenerateOptions
from specpool.errors import InvalidArgumentError
from specpool.v1 import generation_pb2 as pb

PLAIN = "plain"
KINDS: dict[str, GenerateOptions] = {
    PLAIN: {"num_speculative_tokens": 0},
    "default": {},
    "lookup": {"draft_method": "ngram"},
}
STREAMED = 300
"""Tokens of the unconstrained stream."""

Row = dict[str, Any]


async def serve(
    questions: list[Question], options: argparse.Namespace
) -> tuple[list[Row], list[Row], list[tuple[Question, list[int]]]]:
    """A row for each concurrency and kind, rows of an unconstrained stream, and the plain answer to each question."""
    settings = UpSettings(
        port=0, log_level="error", drain_seconds=1, prefix_caching=False, max_num_seqs=max(options.concurrencies)
    )
    console.print("starting the service")
    truth: dict[str, list[int]] = {}
    async with running(settings) as address, AsyncClient(address) as client:
        for kind in KINDS:  # learn the costs of rounds
            await run(client, questions, max(options.concurrencies), kind, options.max_tokens, truth)
        cases = [(concurrency, kind) for concurrency in options.concurrencies for kind in KINDS]
        runs: dict[tuple[int, str], list[Row]] = {case: [] for case in cases}
        for concurrency, kind in progress(cases * options.repeats, "runs"):
            asked = list(islice(cycle(questions), max(len(questions), LOAD * concurrency)))
            runs[concurrency, kind].append(await run(client, asked, concurrency, kind, options.max_tokens, truth))
        others = [await stream_row(client, beside) for beside in ("nobody", "hostile schemas")]
    rows = [summary(*case, found, runs[case[0], PLAIN]) for case, found in runs.items()]
    return rows, others, [(question, truth[question.name]) for question in questions]


async def run(
    client: AsyncClient,
    questions: Sequence[Question],
    concurrency: int,
    kind: str,
    max_tokens: int,
    truth: dict[str, list[int]],
) -> Row:
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


async def stream_row(client: AsyncClient, beside: str) -> Row:
    """Times between the tokens of an unconstrained answer."""
    sent = asyncio.create_task(send_hostile(client)) if beside != "nobody" else None
    times = []
    async for message in client.stream("A story.", max_tokens=STREAMED, ignore_eos=True, num_speculative_tokens=0):
        if message.chunk.token_ids:
            times.append(time.perf_counter())
    if sent is not None:
        sent.cancel()
    gaps = [1e3 * (after - before) for before, after in pairwise(times)]
    shown = {"p50_ms": percentile(gaps, 0.5), "p99_ms": percentile(gaps, 0.99), "max_ms": max(gaps)}
    return {"beside": beside, **{name: round(value or 0, 1) for name, value in shown.items()}}


async def send_hostile(client: AsyncClient) -> None:
    """Send requests with large schemas, each of them new, until cancelled."""
    for number in count():
        branches = [{"type": "object", "properties": {f"k{number}_{i}": {"type": "integer"}}} for i in range(700)]
        nested = '{"type":"array","items":' * 100 + f'{{"const":{number}}}' + "}" * 100
        for schema in (json.dumps({"anyOf": branches}), nested, '{"type":"array","items":' * 5000):
            with suppress(InvalidArgumentError):
                await client.generate("JSON:", json_schema=schema, max_tokens=8)


def summary(concurrency: int, kind: str, runs: list[Row], plain: list[Row]) -> Row:
    """The row of a kind. `plain`: plain runs of the same repeats."""
    ratios = [one["tokens_per_s"] / base["tokens_per_s"] for one, base in zip(runs, plain, strict=True)]
    row: Row = {"concurrency": concurrency, "kind": kind, "tokens_per_s": round(median(runs, "tokens_per_s") or 0, 1)}
    row |= {"ratio": round(statistics.median(ratios), 3), "ratio_min": round(min(ratios), 3)}
    length = median(runs, "acceptance_length")
    row["acceptance_length"] = None if length is None else round(length, 2)
    return row | {name: round(min(one[name] for one in runs), 3) for name in ("ended", "valid", "exact_match")}
