"""Measure how much of two devices' time the service uses. Coordinator, target, draft and client are separate processes.

    python -m benchmarks.split_devices
    python -m benchmarks.split_devices --sequences 1,8 --tokens 300 --repeats 5 --output benchmarks/results

Fake workers wait instead of computing, so they take no cores. The flags give the milliseconds of a pass for the first
row and for each further row. Every answer must equal plain decoding.

plain, default  tokens/s
of_bound        share of the tokens/s of a target that never waits. Plain: between plain passes. Default: with the best
                draft length, if drafts took no time
round_ms        mean time from one round to the next
busy            share of the time that the target spends in passes
cpu_ms          processor time of a round: coordinator, target, draft
"""

import argparse
import asyncio
import statistics
import sys
import time
from collections.abc import Awaitable, Iterable
from contextlib import ExitStack
from typing import Any

from benchmarks.cost.fakes import cpu_seconds, start_coordinator, start_process, wait_ready
from benchmarks.cost.overlap import pass_seconds
from benchmarks.report import devices_figure, finish, output_folder, parser_of, progress, show, whole, wholes
from benchmarks.server_info import current_info
from specpool.cli.processes import free_port
from specpool.client import AsyncClient
from specpool.testing import FakeDraft, FakeTarget
from specpool.testing.fakes import FakeWorker

SLOTS, PROMPT_LENGTH, WARM_UP_TOKENS, MAX_DRAFT_TOKENS = 128, 16, 60, 16
KINDS = {"plain": 0, "default": None}
"""Draft tokens by kind; None: the coordinator decides."""


def main() -> None:
    """Parse the command line and run the benchmark, or serve a fake worker for it."""
    parser = parser_of(__doc__)
    parser.add_argument("--sequences", type=wholes(1, SLOTS), default=[1, 8, 16, 32, 64], help="requests at a time")
    parser.add_argument("--tokens", type=whole(1, 4000), default=300, help="tokens of each answer")
    parser.add_argument("--repeats", type=whole(1, 1000), default=5)
    parser.add_argument("--verify-ms", type=float, nargs=2, default=(6.0, 0.03), metavar=("FIRST", "MORE"))
    parser.add_argument("--draft-ms", type=float, nargs=2, default=(0.8, 0.01), metavar=("FIRST", "MORE"))
    parser.add_argument("--acceptance", type=float, default=0.75)
    parser.add_argument("--output", type=output_folder, help="folder for the result and the plot")
    parser.add_argument("--serve", choices=("target", "draft"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        asyncio.run(serve(options))
        return
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
    finish("split_devices", {**settings, "rows": rows}, options.output, devices_figure(rows))


def measure(count: int, options: argparse.Namespace) -> dict[str, float]:
    """The figures of a service with this many requests in flight."""
    timing = ["--verify-ms", *map(str, options.verify_ms), "--draft-ms", *map(str, options.draft_ms)]
    fakes = [*timing, "--acceptance", str(options.acceptance)]
    with ExitStack() as stack:
        workers = [
            start_process(stack, "-m", "benchmarks.split_devices", "--serve", kind, *fakes)
            for kind in ("target", "draft")
        ]
        addresses = [worker.stdout.readline().strip() for worker in workers if worker.stdout is not None]
        port, size = free_port(), str(count)
        flags = ("--max-num-seqs", size, "--max-batch-size", size)
        coordinator = start_coordinator(stack, port, *addresses, *flags)
        pids = dict(
            zip(("coordinator", "target", "draft"), (each.pid for each in (coordinator, *workers)), strict=True)
        )
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
    """Tokens/s of a target that never waits, with free drafts of the best length, or without drafts."""
    seconds = pass_seconds(*options.verify_ms)
    lengths = range(MAX_DRAFT_TOKENS + 1) if draft_tokens is None else [draft_tokens]
    gains: list[float] = [sum(options.acceptance**i for i in range(k + 1)) for k in lengths]
    return max(count * gain / seconds(count * (k + 1)) for gain, k in zip(gains, lengths, strict=True))


def row(count: int, runs: list[dict[str, float]]) -> dict[str, Any]:
    """Medians of the runs."""
    medians = {name: statistics.median(run[name] for run in runs) for name in runs[0]}
    return {"sequences": count, **{name: round(value, 2) for name, value in medians.items()}}


class OnTheClock(FakeWorker):
    """Rounds take exactly the time of their passes, however long the fake takes to make up an answer."""

    _ends = 0.0

    async def _begin_round(self, context: Any, passes: Iterable[int]) -> None:
        assert self.pass_seconds is not None
        self._ends = time.perf_counter() + sum(map(self.pass_seconds, passes))

    async def _on_time(self, answering: Awaitable[Any]) -> Any:
        began, response = time.perf_counter_ns(), await answering
        # A thread wakes up on time. The event loop rounds pauses up to milliseconds.
        await asyncio.to_thread(lambda: time.sleep(max(0.0, self._ends - time.perf_counter())))
        response.forward_ns = time.perf_counter_ns() - began
        return response


class Target(OnTheClock, FakeTarget):
    async def Verify(self, request: Any, context: Any) -> Any:
        return await self._on_time(super().Verify(request, context))


class Draft(OnTheClock, FakeDraft):
    async def Propose(self, request: Any, context: Any) -> Any:
        return await self._on_time(super().Propose(request, context))


async def serve(options: argparse.Namespace) -> None:
    """Serve a fake worker until killed, and print its address."""
    target = Target(slots=SLOTS, pass_seconds=pass_seconds(*options.verify_ms), device="cuda:0")
    draft = Draft(
        target, options.acceptance, slots=SLOTS, pass_seconds=pass_seconds(*options.draft_ms), device="cuda:1"
    )
    print(await (target if options.serve == "target" else draft).start(), flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    main()
