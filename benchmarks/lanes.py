"""Measure several target workers behind one coordinator. All workers, the coordinator and the client are processes.

    python -m benchmarks.lanes
    python -m benchmarks.lanes --targets 1,2,4,8 --sequences 8 --tokens 300 --repeats 5 --output benchmarks/results
    python -m benchmarks.lanes --drafts 1

The workers' devices are emulated, as in `benchmarks.split_devices`: a pass waits instead of computing. The processor
must not be the bottleneck, so passes are long. Every answer must equal plain decoding.

tokens_per_s    of all target workers
of_ideal        share of the tokens/s of one target worker, times their number
rounds_per_s    of all target workers
busy            mean share of the time that a target worker spends in passes
cpu_ms          processor time of the coordinator per round
targets_cpu_ms  processor time of a target worker per round; includes the emulation itself
"""

import argparse
import asyncio
import statistics
import time
from contextlib import ExitStack
from typing import Any

from matplotlib.figure import Figure

from benchmarks.cost.fakes import READY_SECONDS, cpu_seconds, start_coordinator, start_process, wait_ready
from benchmarks.emulated_worker import SLOTS
from benchmarks.report import PassMs, finish, output_folder, parser_of, progress, show, whole, wholes
from benchmarks.server_info import current_info
from benchmarks.split_devices import WARM_UP_TOKENS, generate_all
from specpool.client import AsyncClient
from specpool.rpc.ports import free_port

MAX_WORKERS = 32


def main() -> None:
    """Parse the command line and run the benchmark."""
    parser = parser_of(__doc__)
    parser.add_argument("--targets", type=wholes(1, MAX_WORKERS), default=[1, 2, 4, 8], help="target workers")
    parser.add_argument("--drafts", type=whole(0, MAX_WORKERS), default=0, help="draft workers; 0: decode plainly")
    parser.add_argument("--sequences", type=whole(1, SLOTS), default=8, help="requests at a time, for each target")
    parser.add_argument("--tokens", type=whole(1, 4000), default=200, help="tokens of each answer")
    parser.add_argument("--repeats", type=whole(1, 1000), default=3)
    parser.add_argument("--verify-ms", action=PassMs, default=(25.0, 0.05))
    parser.add_argument("--draft-ms", action=PassMs, default=(1.0, 0.01))
    parser.add_argument("--output", type=output_folder, help="folder for the result and the plot")
    options = parser.parse_args()
    work = [(count, repeat) for repeat in range(options.repeats) for count in options.targets]
    runs: dict[int, list[dict[str, float]]] = {}
    for count, _ in progress(work, "services"):
        runs.setdefault(count, []).append(measure(count, options))
    rows = rows_of(runs)
    show("several target workers", rows)
    finish("lanes", {**vars(options), "output": None, "rows": rows}, options.output, figure(rows))


def rows_of(runs: dict[int, list[dict[str, float]]]) -> list[dict[str, Any]]:
    """Medians by number of target workers, compared with the smallest number."""
    medians = {
        count: {name: statistics.median(run[name] for run in measured) for name in measured[0]}
        for count, measured in sorted(runs.items())
    }
    fewest = min(medians)
    return [
        {
            "targets": count,
            "tokens_per_s": round(figures["tokens_per_s"], 1),
            "of_ideal": round(figures["tokens_per_s"] / (medians[fewest]["tokens_per_s"] * count / fewest), 3),
            **{name: round(value, 3) for name, value in figures.items() if name != "tokens_per_s"},
        }
        for count, figures in medians.items()
    ]


def measure(count: int, options: argparse.Namespace) -> dict[str, float]:
    """The figures of a service with this many target workers."""
    with ExitStack() as stack:
        targets = [start_worker(stack, "target", options.verify_ms) for _ in range(count)]
        drafts = [start_worker(stack, "draft", options.draft_ms) for _ in range(options.drafts)]
        target_list, draft_list = (",".join(address for address, _ in workers) for workers in (targets, drafts))
        port, size = free_port(), str(options.sequences)
        limits = ("--max-num-seqs", size, "--max-batch-size", size, "--queue-size", str(SLOTS * MAX_WORKERS))
        coordinator = start_coordinator(stack, port, target_list, draft_list or None, *limits).pid
        return asyncio.run(_measure(f"127.0.0.1:{port}", coordinator, [pid for _, pid in targets], options))


def start_worker(stack: ExitStack, kind: str, times: tuple[float, float]) -> tuple[str, int]:
    """Start an emulated worker. Return its address and process id."""
    port = free_port()
    flags = [kind, "--port", str(port), "--pass-ms", *map(str, times), "--log-level", "error"]
    return f"127.0.0.1:{port}", start_process(stack, "-m", "benchmarks.emulated_worker", *flags).pid


async def _measure(address: str, coordinator: int, targets: list[int], options: argparse.Namespace) -> dict[str, float]:
    count, draft_tokens = options.sequences * len(targets), None if options.drafts else 0
    async with AsyncClient(address, retry_seconds=20) as client:
        await wait_ready(client, draft=bool(options.drafts))
        await wait_all_ready(client)
        await generate_all(client, count, WARM_UP_TOKENS, draft_tokens)
        before, used = (await current_info(client)).counters, [cpu_seconds(pid) for pid in (coordinator, *targets)]
        began = time.perf_counter()
        await generate_all(client, count, options.tokens, draft_tokens)
        seconds = time.perf_counter() - began
        own, *others = [cpu_seconds(pid) - earlier for pid, earlier in zip((coordinator, *targets), used, strict=True)]
        after = (await current_info(client)).counters
    rounds = after.rounds - before.rounds
    verify_seconds = after.stage_seconds["verify"] - before.stage_seconds["verify"]
    return {
        "tokens_per_s": count * options.tokens / seconds,
        "rounds_per_s": rounds / seconds,
        "busy": verify_seconds / seconds / len(targets),
        "cpu_ms": 1000 * own / rounds,
        "targets_cpu_ms": 1000 * sum(others) / rounds,
    }


async def wait_all_ready(client: AsyncClient) -> None:
    """Wait until the coordinator is connected to all target workers."""
    async with asyncio.timeout(READY_SECONDS):
        while any(target.state != "ready" for target in (await client.server_info()).targets):  # noqa: ASYNC110
            await asyncio.sleep(0.1)


def figure(rows: list[dict[str, Any]]) -> Figure:
    """Tokens per second by the number of target workers, and those of ideal scaling."""
    plot = Figure(figsize=(7, 4.2), layout="constrained")
    axes, counts = plot.subplots(), [row["targets"] for row in rows]
    axes.plot(counts, [row["tokens_per_s"] for row in rows], "o-", label="measured")
    axes.plot(counts, [row["tokens_per_s"] / row["of_ideal"] for row in rows], "--", label="ideal")
    axes.set(xlabel="target workers", ylabel="tokens/s", ylim=(0, None))
    axes.legend(fontsize="small")
    return plot


if __name__ == "__main__":
    main()
