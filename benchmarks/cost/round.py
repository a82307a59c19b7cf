"""Measure the time that a service spends in models, wire and scheduling, and its idle time.

`GetServerInfo` reports the time of each stage; the rest of the time is idle. Every run prefills its prompts. Runs are
interleaved; the table shows medians.
"""

import argparse
import asyncio
import time
from collections.abc import Sequence
from typing import Any

from benchmarks.prompts import add_prompts, checked, load_prompts, number_of_prompts
from benchmarks.report import finish, median, output_folder, parser_of, show, whole
from benchmarks.runs import Run, current_info, in_turns
from specpool.cli.generate import sure_answers
from specpool.cli.up import running
from specpool.cli.up_settings import UpSettings
from specpool.client import AsyncClient
from specpool.client.prompts import PromptLine

CONCURRENCIES, DRAFT_LENGTHS = (1, 4, 8, 16), (0, 4)
STAGES = {"models": ("draft", "verify"), "realign": ("realign",), "wire": ("wire",), "schedule": ("schedule",)}


def main(arguments: Sequence[str]) -> None:
    parser = parser_of(__doc__, prog="python -m benchmarks.cost --of round")
    parser.add_argument("--target")
    parser.add_argument("--draft")
    add_prompts(parser)
    parser.add_argument("--max-tokens", type=whole(1, 4000), default=48)
    parser.add_argument("--repeats", type=whole(1, 1000), default=3)
    parser.add_argument("--output", type=output_folder, help="folder for the result")
    options = parser.parse_args(arguments)
    count = number_of_prompts(max(CONCURRENCIES))
    options.lines = checked(parser, lambda: load_prompts(options.prompts, count))
    rows = asyncio.run(measure(options))
    show("share of the time in %", rows)
    finish("round", {"max_tokens": options.max_tokens, "repeats": options.repeats, "rows": rows}, options.output)


async def measure(options: argparse.Namespace) -> list[dict[str, Any]]:
    settings = UpSettings(
        port=0, log_level="error", drain_seconds=1, prefix_caching=False, target=options.target, draft=options.draft
    )
    cases = [(concurrency, k) for concurrency in CONCURRENCIES for k in DRAFT_LENGTHS]
    async with running(settings) as address, AsyncClient(address) as client:
        await run(client, options.lines[:2], 1, max(DRAFT_LENGTHS), options.max_tokens)  # warms up both workers
        found = await in_turns(
            cases,
            options.repeats,
            lambda case: run(client, options.lines[: number_of_prompts(case[0])], *case, options.max_tokens),
        )
    return [
        {"concurrency": concurrency, "k": k, **{name: round(median(runs, name) or 0.0, 2) for name in runs[0]}}
        for (concurrency, k), runs in found.items()
    ]


async def run(client: AsyncClient, lines: list[PromptLine], concurrency: int, k: int, max_tokens: int) -> Run:
    """Run all prompts once: speed, milliseconds of a round, and shares of the time."""
    before, began, tokens = (await current_info(client)).counters, time.perf_counter(), 0
    async for response in sure_answers(client, lines, concurrency, max_tokens=max_tokens, num_speculative_tokens=k):
        tokens += len(response.token_ids)
    seconds, after = time.perf_counter() - began, (await current_info(client)).counters
    spent = {
        name: sum(after.stage_seconds[stage] - before.stage_seconds[stage] for stage in stages)
        for name, stages in STAGES.items()
    }
    shares = {name: 100 * stage / seconds for name, stage in spent.items()}
    round_ms = 1000 * sum(spent.values()) / (after.rounds - before.rounds)
    return {"tokens_per_s": tokens / seconds, "round_ms": round_ms, **shares, "idle": 100 - sum(shares.values())}
