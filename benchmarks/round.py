"""Shares of the service's time over real sockets: models, wire, scheduling, and idling.

    python -m benchmarks.round [--target FOLDER] [--draft FOLDER] [--prompts FILE] [--repeats 3] [--output FOLDER]

All stages are those of `GetServerInfo`; idle is what no round accounts for. Every run prefills its prompts. Runs
are interleaved, medians are shown. The last line printed is JSON.
"""

import argparse
import asyncio
import statistics
import time
from pathlib import Path
from typing import Any

from benchmarks.prompts import load_prompts, number_of_prompts
from benchmarks.report import finish, output_folder, progress, show
from specpool.cli.generate import sure_answers
from specpool.cli.up import UpSettings, running
from specpool.client import AsyncClient
from specpool.client.prompts import PromptLine
from specpool.v1 import generation_pb2 as pb

CONCURRENCIES, DRAFTED = (1, 4, 8, 16), (0, 4)
STAGES = {"models": ("draft", "verify"), "realign": ("realign",), "wire": ("wire",), "schedule": ("schedule",)}


def main() -> None:
    """Parses the command line, measures, prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target")
    parser.add_argument("--draft")
    parser.add_argument("--prompts", type=Path)
    parser.add_argument("--max-tokens", type=int, default=48)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--output", type=output_folder, help="folder for the result")
    options = parser.parse_args()
    rows = asyncio.run(measure(options))
    show("share of the time in %", rows)
    finish("round", {"max_tokens": options.max_tokens, "repeats": options.repeats, "rows": rows}, options.output)


async def measure(options: argparse.Namespace) -> list[dict[str, Any]]:
    """One row for each concurrency and draft length: medians over the repeats."""
    lines = load_prompts(options.prompts, number_of_prompts(max(CONCURRENCIES)))
    settings = UpSettings(
        port=0, log_level="error", drain_seconds=1, prefix_caching=False, target=options.target, draft=options.draft
    )
    cases = [(concurrency, k) for concurrency in CONCURRENCIES for k in DRAFTED]
    found: dict[tuple[int, int], list[dict[str, float]]] = {case: [] for case in cases}
    async with running(settings) as address, AsyncClient(address) as client:
        await run(client, lines[:2], 1, max(DRAFTED), options.max_tokens)  # warms up both workers
        for concurrency, k in progress([case for _ in range(options.repeats) for case in cases], "runs"):
            some = lines[: number_of_prompts(concurrency)]
            found[concurrency, k].append(await run(client, some, concurrency, k, options.max_tokens))
    return [
        {"concurrency": case[0], "k": case[1], **{name: median(runs, name) for name in runs[0]}}
        for case, runs in found.items()
    ]


def median(runs: list[dict[str, float]], name: str) -> float:
    """The median of one measure."""
    return round(statistics.median(run[name] for run in runs), 2)


async def run(
    client: AsyncClient, lines: list[PromptLine], concurrency: int, k: int, max_tokens: int
) -> dict[str, float]:
    """All prompts once: speed, milliseconds of a round, and shares of the time."""
    before, began, tokens = await counters(client), time.perf_counter(), 0
    async for response in sure_answers(client, lines, concurrency, max_tokens=max_tokens, num_speculative_tokens=k):
        tokens += len(response.token_ids)
    seconds, after = time.perf_counter() - began, await counters(client)
    spent = {
        name: sum(after.stage_seconds[stage] - before.stage_seconds[stage] for stage in stages)
        for name, stages in STAGES.items()
    }
    shares = {name: 100 * stage / seconds for name, stage in spent.items()}
    round_ms = 1000 * sum(spent.values()) / (after.rounds - before.rounds)
    return {"tokens_per_s": tokens / seconds, "round_ms": round_ms, **shares, "idle": 100 - sum(shares.values())}


async def counters(client: AsyncClient) -> pb.ServerCounters:
    """The server's counters by now."""
    return (await client.server_info()).counters


if __name__ == "__main__":
    main()
