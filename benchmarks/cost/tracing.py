"""Measure the coordinator's CPU time per round with every request traced, and without traces.

Fake workers answer at once, so rounds are as short as possible. A collector in another process discards all spans.
"""

import argparse
import asyncio
import json
import statistics
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import grpc

from benchmarks.cost.fakes import (
    cpu_seconds,
    first_line,
    load_options,
    run_once,
    start_coordinator,
    start_fakes,
    wait_ready,
)  # fmt: skip
from benchmarks.report import finish, progress, show
from specpool.client import AsyncClient

PORT = 50058
RUNS = 3
SERVICE = "opentelemetry.proto.collector.trace.v1.TraceService"
COLLECT = "from benchmarks.cost.tracing import collect; collect()"


def main(arguments: Sequence[str]) -> None:
    """Parse the command line and run the benchmark."""
    options = load_options("tracing", __doc__, 200, arguments)
    with ExitStack() as stack:
        workers = start_fakes(stack)
        flags: dict[str, list[str]] = {"off": [], "on": ["--otlp-traces-endpoint", first_line(stack, "-c", COLLECT)]}
        runs: dict[str, list[float]] = {name: [] for name in flags}
        for _ in progress(range(options.repeats), "rounds with fake workers"):
            for name in flags:
                runs[name].append(measure(workers, flags[name], options))
    result: dict[str, object] = {f"{name}_ms": round(statistics.median(found), 4) for name, found in runs.items()}
    result |= {f"{name}_min_ms": round(min(found), 4) for name, found in runs.items()}
    show("processor time of the coordinator per round", [{"measure": key, "value": result[key]} for key in result])
    finish("tracing_cost", result, None)


def collect() -> None:
    """Serve a collector until killed, and print its URL."""
    server = grpc.server(ThreadPoolExecutor(1))
    export: Any = grpc.unary_unary_rpc_method_handler(lambda request, context: b"")
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, {"Export": export}),))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    print(json.dumps(f"http://127.0.0.1:{port}"), flush=True)
    server.wait_for_termination()


def measure(workers: tuple[str, str], flags: list[str], options: argparse.Namespace) -> float:
    """Milliseconds of processor time per round of a fresh coordinator."""
    with ExitStack() as stack:
        process = start_coordinator(stack, PORT, *workers, *flags)
        return asyncio.run(_run(process.pid, options))


async def _run(pid: int, options: argparse.Namespace) -> float:
    async with AsyncClient(f"127.0.0.1:{PORT}") as client:
        await wait_ready(client)
        await run_once(client, options)  # warms up
        before = cpu_seconds(pid)
        rounds = sum([(await run_once(client, options))["rounds"] for _ in range(RUNS)])
        return (cpu_seconds(pid) - before) * 1000 / rounds
