"""Measure how much of the devices' time the service uses. Coordinator, workers and client are separate processes.

    python -m benchmarks.split_devices
    python -m benchmarks.split_devices --sequences 1,8 --tokens 300 --repeats 5 --output benchmarks/results
    python -m benchmarks.split_devices --one-device

The workers' devices are emulated: a pass waits instead of computing, so it uses no CPU core. `--verify-ms` and
`--draft-ms` are the milliseconds of a pass for the first row and for each further row. Every answer must equal plain
decoding. "plain" does not draft, and "default" drafts as many tokens as the coordinator chooses.

With `--one-device`, a single target worker carries the draft, and "k4" and "k2" draft a fixed number of tokens. By
default, draft steps take as long as those of a small model, then as long as those of an EAGLE head.

tokens_per_s    generated tokens of all sequences
of_bound        tokens/s relative to a device that never waits, with the best number of draft tokens for "default".
                On two devices, this bound counts no time for drafts
ratio           tokens/s relative to plain decoding; `ratio_bound` is the same ratio for the bounds
round_ms        mean time from one round to the next
busy            share of the time that the target worker spends in rounds
passes_ms       on one device: time of both models' passes in a round; `outside_ms` is the rest of the round
cpu_ms          processor time per round of the coordinator and the workers; includes the emulation itself
"""

import argparse
import asyncio
import statistics
import sys
import tempfile
import time
from contextlib import ExitStack
from itertools import product
from pathlib import Path
from typing import Any

from benchmarks.cost.fakes import cpu_seconds, start_coordinator, start_process, wait_ready
from benchmarks.emulated_device import SLOTS, pass_seconds, read_meter
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
LARGE_BATCH = 64
"""Number of sequences from which a smaller fixed number of draft tokens pays."""
TWO_DEVICES: dict[str, Any] = {
    "sequences": [1, 8, 16, 32, 64], "verify_ms": (6.0, 0.03), "draft_ms": [(0.8, 0.01)], "acceptance": 0.75,
}  # fmt: skip
ONE_DEVICE: dict[str, Any] = {
    "sequences": [1, 8, 64], "verify_ms": (4.8, 0.015), "draft_ms": [(1.25, 0.0), (0.23, 0.0)], "acceptance": 0.7,
}  # fmt: skip
Run = dict[str, float]
PassTimes = tuple[float, float]
"""Milliseconds of a pass: for its first row, and for each further row."""


def main() -> None:
    options = parse()
    cases = list(product(options.draft_ms, options.sequences))
    runs: dict[tuple[PassTimes, int, str], list[Run]] = {}
    for (draft_ms, count), _ in progress(list(product(cases, range(options.repeats))), "services"):
        for kind, run in measure(count, draft_ms, options).items():
            runs.setdefault((draft_ms, count, kind), []).append(run)
    rows = [row(*case, found, runs[case[0], case[1], "plain"], options) for case, found in runs.items()]
    show("one device" if options.one_device else "two devices", rows)
    finish("split_devices", {**vars(options), "output": None, "rows": rows}, options.output)


def parse() -> argparse.Namespace:
    """Options of the command line, with the defaults of the arrangement."""
    parser = parser_of(__doc__)
    parser.add_argument("--one-device", action="store_true", help="one target worker that carries the draft")
    parser.add_argument("--sequences", type=wholes(1, SLOTS), help="requests at a time")
    parser.add_argument("--tokens", type=whole(1, 4000), default=300, help="tokens of each answer")
    parser.add_argument("--repeats", type=whole(1, 1000), default=5)
    parser.add_argument("--verify-ms", action=PassMs)
    parser.add_argument("--draft-ms", action=PassMs)
    parser.add_argument("--acceptance", type=chance)
    parser.add_argument("--second-guess", type=chance, default=0.5)
    parser.add_argument("--delay-ms", type=milliseconds, default=0.0, help="network delay of a message")
    parser.add_argument("--output", type=output_folder, help="folder for the result")
    options = parser.parse_args()
    if options.draft_ms is not None:
        options.draft_ms = [tuple(options.draft_ms)]
    for name, value in (ONE_DEVICE if options.one_device else TWO_DEVICES).items():
        if getattr(options, name) is None:
            setattr(options, name, value)
    return options


def kinds_of(count: int, options: argparse.Namespace) -> dict[str, int | None]:
    """Draft tokens by kind; None: the coordinator decides."""
    k = 2 if count >= LARGE_BATCH else 4
    return {"plain": 0, **({f"k{k}": k} if options.one_device else {}), "default": None}


def measure(count: int, draft_ms: PassTimes, options: argparse.Namespace) -> dict[str, Run]:
    """Start a service, and measure a run of each kind."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        shared = ["--delay-ms", str(options.delay_ms), "--log-level", "error"]
        drafts = ["--acceptance", str(options.acceptance), "--second-guess", str(options.second_guess)]
        flags = {"target": ["--pass-ms", *map(str, options.verify_ms), "--meter", str(folder / "meter")]}
        if options.one_device:
            flags["target"] += ["--draft-ms", *map(str, draft_ms), *drafts]
        else:
            flags["draft"] = ["--pass-ms", *map(str, draft_ms), *drafts]
        addresses, pids = {}, {}
        for role, own in flags.items():
            port = free_port()
            command = ["-m", "benchmarks.emulated_worker", role, "--port", str(port), *own, *shared]
            pids[role] = start_process(stack, *command).pid
            addresses[role] = f"127.0.0.1:{port}"
        port, limits = free_port(), ("--max-num-seqs", str(count), "--max-batch-size", str(count), "--audit-share", "0")
        pids["coordinator"] = start_coordinator(stack, port, addresses["target"], addresses.get("draft"), *limits).pid
        return asyncio.run(_measure(f"127.0.0.1:{port}", pids, count, folder / "meter", options))


async def _measure(
    address: str, pids: dict[str, int], count: int, meter: Path, options: argparse.Namespace
) -> dict[str, Run]:
    runs: dict[str, Run] = {}
    async with AsyncClient(address, retry_seconds=20) as client:
        await wait_ready(client)
        for kind, draft_tokens in kinds_of(count, options).items():
            await generate_all(client, count, WARM_UP_TOKENS, draft_tokens)
            before, used = (await current_info(client)).counters, {name: cpu_seconds(pid) for name, pid in pids.items()}
            began, passes = time.perf_counter(), read_meter(meter)
            await generate_all(client, count, options.tokens, draft_tokens)
            seconds, passes = time.perf_counter() - began, read_meter(meter) - passes
            used = {name: cpu_seconds(pid) - used[name] for name, pid in pids.items()}
            after = (await current_info(client)).counters
            rounds = after.rounds - before.rounds
            if draft_tokens and after.draft_tokens == before.draft_tokens:
                sys.exit(f"no drafts were verified with {draft_tokens} draft tokens a round")
            runs[kind] = {
                "tokens_per_s": count * options.tokens / seconds,
                "round_ms": 1000 * seconds / rounds,
                "busy": (after.stage_seconds["verify"] - before.stage_seconds["verify"]) / seconds,
                **({"passes_ms": 1000 * passes / rounds} if options.one_device else {}),
                **({"outside_ms": 1000 * (seconds - passes) / rounds} if options.one_device else {}),
                **{f"{name}_cpu_ms": 1000 * used[name] / rounds for name in pids},
            }
    return runs


async def generate_all(client: AsyncClient, count: int, tokens: int, draft_tokens: int | None) -> None:
    """Generate `count` answers at once, and compare each with plain decoding."""
    reference, prompts = FakeTarget(slots=1), [[number] * PROMPT_LENGTH for number in range(count)]
    options: dict[str, Any] = {"max_tokens": tokens, "num_speculative_tokens": draft_tokens, "ignore_eos": True}
    answers = await asyncio.gather(*(client.generate(prompt, **options) for prompt in prompts))
    for prompt, answer in zip(prompts, answers, strict=True):
        if list(answer.token_ids) != reference.continuation(prompt, tokens):
            sys.exit("an answer differs from plain decoding")


def bound(count: int, draft_tokens: int | None, draft_ms: PassTimes, options: argparse.Namespace) -> float:
    """Tokens/s of a device that never waits. `draft_tokens`: None: the best number."""
    verify, draft = pass_seconds(*options.verify_ms), pass_seconds(*draft_ms)
    speeds: list[float] = []
    for k in range(MAX_DRAFT_TOKENS + 1) if draft_tokens is None else [draft_tokens]:
        seconds = verify(count * (k + 1)) + (k * draft(count) if options.one_device else 0.0)
        speeds.append(count * sum(options.acceptance**i for i in range(k + 1)) / seconds)
    return max(speeds)


def row(
    draft_ms: PassTimes, count: int, kind: str, runs: list[Run], plain: list[Run], options: argparse.Namespace
) -> dict[str, Any]:
    """Medians of the runs of a case. `plain`: the plain runs of the same services."""
    most = bound(count, kinds_of(count, options)[kind], draft_ms, options)
    medians = {name: statistics.median(run[name] for run in runs) for name in runs[0]}
    ratio = statistics.median(
        run["tokens_per_s"] / other["tokens_per_s"] for run, other in zip(runs, plain, strict=True)
    )
    figures = {
        "tokens_per_s": medians.pop("tokens_per_s"),
        "of_bound": statistics.median(run["tokens_per_s"] for run in runs) / most,
        "ratio": ratio,
        "ratio_bound": most / bound(count, 0, draft_ms, options),
        **medians,
    }
    case = {"draft_ms": draft_ms[0], "sequences": count, "kind": kind}
    return case | {name: round(value, 2) for name, value in figures.items()}


if __name__ == "__main__":
    main()
