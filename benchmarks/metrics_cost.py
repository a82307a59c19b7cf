"""What metrics cost: the observations of a round, a scrape, and whole rounds with and without them.

    python -m benchmarks.metrics_cost [--sequences 8] [--tokens 1000] [--k 4] [--repeats 5]

Rounds have fake workers that cost nothing; coordinators with and without metrics take turns. Beside the time of a round
there is the processor time that the coordinator spent on it, which depends less on what else the machine does. The
last line printed is JSON.
"""

import argparse
import asyncio
import json
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from urllib.request import urlopen

from benchmarks.coordinator_cost import run_once, start_process, wait_ready
from benchmarks.report import add_load_arguments, finish, progress, seconds_of, show
from coordinator.requests.generation import Sample
from coordinator.requests.latencies import Latencies
from coordinator.scheduling.commits import Commit
from coordinator.scheduling.sequence import GenerationRequest, Sequence
from specpool.client import AsyncClient

PORTS = {"off": 50060, "on": 50061}
METRICS_PORT = 50062
OBSERVATIONS, SCRAPES, FLOOD, FLOOD_CLIENTS = 20_000, 6, 100, 8
EMBEDDED_PAIR_ROUND_MS = {1: 18.0, 8: 28.2, 16: 39.2}
"""A plain step of the embedded pair by sequences: its shortest rounds (docs/benchmarks.md)."""


def main() -> None:
    """Parses the command line, measures, prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_load_arguments(parser, tokens=1000)
    options = parser.parse_args()
    commit_us = min(measure_commit() for _ in range(options.repeats)) * 1e6
    rounds, scrape = measure_rounds(options)
    result: dict[str, Any] = {"sequences": options.sequences, "observe_a_commit_us": round(commit_us, 3)}
    for sequences, milliseconds in EMBEDDED_PAIR_ROUND_MS.items():
        share = commit_us * sequences / 1000 / milliseconds
        result[f"share_of_a_round_of_{sequences}_percent"] = round(100 * share, 4)
    for metrics, runs in rounds.items():
        for name in ("round_ms", "cpu_ms"):
            result[f"{name}_{metrics}"] = round(statistics.median(run[name] for run in runs), 4)
    result |= {name: round(value, 4) for name, value in scrape.items()}
    show("cost of metrics", [{"measure": name, "value": value} for name, value in result.items()])
    finish("metrics_cost", result, None)


def measure_commit() -> float:
    """Seconds that metrics add to a commit: to observe it, and to read the clock."""
    latencies, sequence = Latencies(), Sequence(1, GenerationRequest("r", (1, 2, 3), 100, frozenset(), 4))
    sample = Sample(sequence, 0, time.monotonic())
    sample.add(Commit(sequence, (1, 2), str))

    def observe() -> None:
        for _ in range(OBSERVATIONS):
            latencies.committed(sample)

    sample.gap = 0.02
    return seconds_of(observe) / OBSERVATIONS + seconds_of(_read_clocks) / OBSERVATIONS


def _read_clocks() -> None:
    for _ in range(OBSERVATIONS):
        time.monotonic()


def measure_rounds(options: argparse.Namespace) -> tuple[dict[str, list[dict[str, float]]], dict[str, float]]:
    """Runs of each coordinator, and the cost of a scrape of the one with metrics."""
    with ExitStack() as stack:
        fakes = start_process(stack, "-m", "benchmarks.coordinator_cost", "--serve-fakes")
        assert fakes.stdout is not None
        target, draft = json.loads(fakes.stdout.readline())
        pids = {}
        for metrics, port in PORTS.items():
            flags = ["--target-address", target, "--draft-address", draft, "--port", str(port), "--log-level", "error"]
            flags += ["--metrics-port", str(METRICS_PORT), "--metrics-compat", "vllm"] if metrics == "on" else []
            pids[metrics] = start_process(stack, "-m", "coordinator.server", *flags).pid
        return asyncio.run(_run_all(pids, options)), measure_scrapes(pids["on"])


async def _run_all(pids: dict[str, int], options: argparse.Namespace) -> dict[str, list[dict[str, float]]]:
    runs: dict[str, list[dict[str, float]]] = {metrics: [] for metrics in PORTS}
    async with AsyncClient(f"127.0.0.1:{PORTS['off']}") as off, AsyncClient(f"127.0.0.1:{PORTS['on']}") as on:
        clients = {"off": off, "on": on}
        for client in clients.values():
            await wait_ready(client)
            await run_once(client, options)  # warms up
        for repeat in progress(range(options.repeats), "rounds with and without metrics"):
            for metrics in sorted(clients, reverse=repeat % 2 == 1):
                before = cpu_seconds(pids[metrics])
                run = await run_once(clients[metrics], options)
                spent = cpu_seconds(pids[metrics]) - before
                runs[metrics].append({**run, "cpu_ms": spent * 1000 / run["rounds"]})
    return runs


def measure_scrapes(pid: int) -> dict[str, float]:
    """Processor time of a scrape beyond that of an idle process, the size of its answer, and the share of a core that a
    flood of scrapes takes."""
    idle = _spent(pid, lambda: None)
    scraped = _spent(pid, _scrape)
    with ThreadPoolExecutor(FLOOD_CLIENTS) as clients:
        before, began = cpu_seconds(pid), time.perf_counter()
        list(clients.map(lambda _: _scrape(), range(FLOOD)))
        share = (cpu_seconds(pid) - before) / (time.perf_counter() - began)
    return {
        "scrape_cpu_ms": (scraped - idle) * 1000 / SCRAPES,
        "scrape_kib": _scrape() / 1024,
        "flood_cpu_percent": 100 * share,
    }


def _spent(pid: int, work: Callable[[], object]) -> float:
    """Processor time of a process while the work is done every second."""
    before = cpu_seconds(pid)
    for _ in range(SCRAPES):
        work()
        time.sleep(1)
    return cpu_seconds(pid) - before


def _scrape() -> int:
    """Bytes of an answer."""
    with urlopen(f"http://127.0.0.1:{METRICS_PORT}/metrics", timeout=30) as response:
        return len(response.read())


def cpu_seconds(pid: int) -> float:
    """Processor time of all threads of a process that still run."""
    return sum(int(path.read_text().split()[0]) for path in Path(f"/proc/{pid}/task").glob("*/schedstat")) / 1e9


if __name__ == "__main__":
    main()
