"""Measure the cost of metrics: observations, scrapes, and whole rounds with and without metrics.

Fake workers answer at once. Coordinators with and without metrics take turns. The benchmark reports CPU time too,
because other processes on the machine disturb it less than elapsed time.
"""

import argparse
import asyncio
import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from timeit import timeit
from typing import Any
from urllib.request import urlopen

from benchmarks.cost.fakes import cpu_seconds, load_options, run_once, start_coordinator, start_fakes, wait_ready
from benchmarks.report import finish, progress, show
from coordinator.requests.generation import Sample
from coordinator.requests.latencies import Latencies
from coordinator.scheduling.commits import Commit
from coordinator.scheduling.sequence import GenerationRequest
from coordinator.scheduling.sequence import Sequence as PoolSequence
from specpool.client import AsyncClient

PORTS = {"off": 50060, "on": 50061}
METRICS_PORT = 50062
OBSERVATIONS, SCRAPES, FLOOD, FLOOD_CLIENTS = 20_000, 6, 100, 8
EMBEDDED_PAIR_ROUND_MS = {1: 18.0, 8: 28.2, 16: 39.2}
"""A plain step of the embedded pair by number of sequences (docs/benchmarks.md)."""


def main(arguments: Sequence[str]) -> None:
    """Parse the command line and run the benchmark."""
    options = load_options("metrics", __doc__, 1000, arguments)
    commit_us = min(measure_commit() for _ in range(options.repeats)) * 1e6
    with ExitStack() as stack:
        workers = start_fakes(stack)
        flags = {"off": (), "on": ("--metrics-port", str(METRICS_PORT), "--metrics-compat", "vllm")}
        pids = {name: start_coordinator(stack, port, *workers, *flags[name]).pid for name, port in PORTS.items()}
        rounds = asyncio.run(run_all(pids, options))
        scrape = measure_scrapes(pids["on"])
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
    """Seconds that metrics add to a commit: the observation and a clock reading."""
    latencies = Latencies()
    sequence = PoolSequence(1, GenerationRequest("r", (1, 2, 3), 100, frozenset(), 4))
    sample = Sample(sequence, 0, time.monotonic())
    sample.add(Commit(sequence, (1, 2), str))
    sample.gap = 0.02

    observing = timeit(partial(latencies.committed, sample), number=OBSERVATIONS)
    return (observing + timeit(time.monotonic, number=OBSERVATIONS)) / OBSERVATIONS


async def run_all(pids: dict[str, int], options: argparse.Namespace) -> dict[str, list[dict[str, float]]]:
    """Interleaved runs of both coordinators."""
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
    """Processor time and size of a scrape, and the share of a core that a flood of scrapes takes."""
    idle, scraped = _spent(pid, lambda: None), _spent(pid, _scrape)
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
    """Processor time of a process over SCRAPES seconds, with one call of `work` a second."""
    before = cpu_seconds(pid)
    for _ in range(SCRAPES):
        work()
        time.sleep(1)
    return cpu_seconds(pid) - before


def _scrape() -> int:
    """Bytes of a scrape."""
    with urlopen(f"http://127.0.0.1:{METRICS_PORT}/metrics", timeout=30) as response:
        return len(response.read())
