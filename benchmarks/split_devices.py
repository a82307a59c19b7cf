"""Measure how much of two devices' time the service uses. Coordinator, target, draft and client are separate processes.

    python -m benchmarks.split_devices
    python -m benchmarks.split_devices --sequences 1,8 --tokens 300 --repeats 5 --output benchmarks/results

The workers' devices are emulated: a pass waits instead of computing, so it uses no CPU core. `--verify-ms` and
`--draft-ms` are the milliseconds of a pass for the first row and for each further row. Every answer must equal plain
decoding.

plain, default  tokens/s
of_bound        share of the tokens/s of a target that never waits: for plain, with plain passes; for default, with
                drafts of the best length that take no time
round_ms        mean time from one round to the next
busy            share of the time that the target spends in passes
cpu_ms          processor time per round of the coordinator, target and draft; includes the emulation itself
"""

import argparse
import asyncio
import statistics
import sys
import time
from contextlib import ExitStack
from typing import Any

from benchmarks.cost.fakes import cpu_seconds, start_coordinator, start_process, wait_ready
from benchmarks.emulated_worker import SLOTS, pass_seconds
from benchmarks.report import (
    PassMs,
    chance,
    finish,
    milliseconds,
    output_folder,
    parser_of,
    progress,
    show,
    whole,
    wholes,
)
from benchmarks.runs import current_info
from specpool.client import AsyncClient
from specpool.rpc.ports import free_port
from specpool.testing import FakeTarget

PROMPT_LENGTH, WARM_UP_TOKENS, MAX_DRAFT_TOKENS = 16, 60, 16
KINDS = {"plain": 0, "default": None}
"""Draft tokens by kind; None: the coordinator decides."""


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--sequences", type=wholes(1, SLOTS), default=[1, 8, 16, 32, 64], help="requests at a time")
    parser.add_argument("--tokens", type=whole(1, 4000), default=300, help="tokens of each answer")
    parser.add_argument("--repeats", type=whole(1, 1000), default=5)
    parser.add_argument("--verify-ms", action=PassMs, default=(6.0, 0.03))
    parser.add_argument("--draft-ms", action=PassMs, default=(0.8, 0.01))
    parser.add_argument("--acceptance", type=chance, default=0.75)
    parser.add_argument("--second-guess", type=chance, default=0.5)
    parser.add_argument("--delay-ms", type=milliseconds, default=0.0, help="network delay of a message")
    parser.add_argument("--output", type=output_folder, help="folder for the result")
    options = parser.parse_args()
    work = [(count, repeat) for count in options.sequences for repeat in range(options.repeats)]
    runs: dict[int, list[dict[str, float]]] = {}
    for count, _ in progress(work, "services"):
        runs.setdefault(count, []).append(measure(count, options))
    rows = [row(count, measured) for count, measured in runs.items()]
    show("two devices", [{name: value for name, value in each.items() if "cpu" not in name} for each in rows])
    show(
        "processor time of a round, ms",
        [{n: v for n, v in each.items() if "cpu" in n or n == "sequences"} for each in rows],
    )
    settings = {**vars(options), "output": None}
    finish("split_devices", {**settings, "rows": rows}, options.output)


def measure(count: int, options: argparse.Namespace) -> dict[str, float]:
    with ExitStack() as stack:
        addresses, pids = [], {}
        for kind, times in (("target", options.verify_ms), ("draft", options.draft_ms)):
            port = free_port()
            flags = [kind, "--port", str(port), "--pass-ms", *map(str, times), "--delay-ms", str(options.delay_ms)]
            if kind == "draft":
                flags += ["--acceptance", str(options.acceptance), "--second-guess", str(options.second_guess)]
            flags += ["--log-level", "error"]
            pids[kind] = start_process(stack, "-m", "benchmarks.emulated_worker", *flags).pid
            addresses.append(f"127.0.0.1:{port}")
        port, size = free_port(), str(count)
        limits = ("--max-num-seqs", size, "--max-batch-size", size)
        pids["coordinator"] = start_coordinator(stack, port, *addresses, *limits).pid
        return asyncio.run(_measure(f"127.0.0.1:{port}", pids, count, options))


async def _measure(address: str, pids: dict[str, int], count: int, options: argparse.Namespace) -> dict[str, float]:
    figures: dict[str, float] = {}
    async with AsyncClient(address, retry_seconds=20) as client:
        await wait_ready(client)
        for kind, draft_tokens in KINDS.items():
            await generate_all(client, count, WARM_UP_TOKENS, draft_tokens)
            before, used = (await current_info(client)).counters, {name: cpu_seconds(pid) for name, pid in pids.items()}
            began = time.perf_counter()
            await generate_all(client, count, options.tokens, draft_tokens)
            seconds = time.perf_counter() - began
            used = {name: cpu_seconds(pid) - used[name] for name, pid in pids.items()}
            after = (await current_info(client)).counters
            rounds = after.rounds - before.rounds
            figures[kind] = count * options.tokens / seconds
            figures[f"{kind}_of_bound"] = figures[kind] / bound(count, draft_tokens, options)
            figures[f"{kind}_round_ms"] = 1000 * seconds / rounds
            figures[f"{kind}_busy"] = (after.stage_seconds["verify"] - before.stage_seconds["verify"]) / seconds
            figures |= {f"{kind}_{name}_cpu_ms": 1000 * used[name] / rounds for name in pids}
    return figures


async def generate_all(client: AsyncClient, count: int, tokens: int, draft_tokens: int | None) -> None:
    """Generate `count` answers at once, and compare each with plain decoding."""
    reference, prompts = FakeTarget(slots=1), [[number] * PROMPT_LENGTH for number in range(count)]
    options: dict[str, Any] = {"max_tokens": tokens, "num_speculative_tokens": draft_tokens, "ignore_eos": True}
    answers = await asyncio.gather(*(client.generate(prompt, **options) for prompt in prompts))
    for prompt, answer in zip(prompts, answers, strict=True):
        if list(answer.token_ids) != reference.continuation(prompt, tokens):
            sys.exit("an answer differs from plain decoding")


def bound(count: int, draft_tokens: int | None, options: argparse.Namespace) -> float:
    """Tokens/s of a target that never waits, with drafts of the best length that take no time, or without drafts."""
    seconds = pass_seconds(*options.verify_ms)
    lengths = range(MAX_DRAFT_TOKENS + 1) if draft_tokens is None else [draft_tokens]
    gains: list[float] = [sum(options.acceptance**i for i in range(k + 1)) for k in lengths]
    return max(count * gain / seconds(count * (k + 1)) for gain, k in zip(gains, lengths, strict=True))


def row(count: int, runs: list[dict[str, float]]) -> dict[str, Any]:
    medians = {name: statistics.median(run[name] for run in runs) for name in runs[0]}
    return {"sequences": count, **{name: round(value, 2) for name, value in medians.items()}}


if __name__ == "__main__":
    main()
