"""What traces cost the coordinator: its processor time per round without them, and with every request traced.

    python -m benchmarks.tracing_cost [--sequences 8] [--tokens 200] [--k 4] [--repeats 5]

Processor time, unlike wall time, hardly depends on what else the machine does. The workers are fakes, so that a round
is as short as it can be. A collector that discards all spans runs in a process of its own, like everything else. The
last line printed is JSON.
"""

import argparse
import asyncio
import json
import statistics
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import grpc

from benchmarks.coordinator_cost import run_once, start_process, wait_ready
from benchmarks.report import add_load_arguments, finish, progress, show
from specpool.client import AsyncClient

ADDRESS = "127.0.0.1:50058"
NAMES = ("off", "on")


def main() -> None:
    """Parses the command line, measures, prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_load_arguments(parser, tokens=200)
    parser.add_argument("--collect", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.collect:
        collect()
        return
    with ExitStack() as stack:
        fakes = _first_line(stack, "-m", "benchmarks.coordinator_cost", "--serve-fakes")
        collector = _first_line(stack, "-m", "benchmarks.tracing_cost", "--collect")
        flags: dict[str, list[str]] = {"off": [], "on": ["--otlp-traces-endpoint", collector]}
        runs: dict[str, list[float]] = {name: [] for name in NAMES}
        for _ in progress(range(options.repeats), "rounds with fake workers"):
            for name in NAMES:  # in turn, since the machine is not the same all the time
                runs[name].append(_measure(fakes, flags[name], options))
    result: dict[str, object] = {f"{name}_ms": round(statistics.median(runs[name]), 4) for name in NAMES}
    result |= {f"{name}_least_ms": round(min(runs[name]), 4) for name in NAMES}
    show("processor time of the coordinator per round", [{"measure": key, "value": result[key]} for key in result])
    finish("tracing_cost", result, None)


def collect() -> None:
    """Serves a collector until killed; prints its URL."""
    server = grpc.server(ThreadPoolExecutor(1))
    export: Any = grpc.unary_unary_rpc_method_handler(lambda request, context: b"")
    service = "opentelemetry.proto.collector.trace.v1.TraceService"
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, {"Export": export}),))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    print(json.dumps(f"http://127.0.0.1:{port}"), flush=True)
    server.wait_for_termination()


def _first_line(stack: ExitStack, *arguments: str) -> Any:
    process = start_process(stack, *arguments)
    assert process.stdout is not None
    return json.loads(process.stdout.readline())


def _measure(fakes: list[str], flags: list[str], options: argparse.Namespace) -> float:
    """Milliseconds of processor time per round of a fresh coordinator."""
    target, draft = fakes
    own = ["--target-address", target, "--draft-address", draft, "--port", ADDRESS.split(":")[1], *flags]
    with ExitStack() as stack:
        process = start_process(stack, "-m", "coordinator.server", *own, "--log-level", "error")
        return asyncio.run(_run(process.pid, options))


async def _run(pid: int, options: argparse.Namespace) -> float:
    async with AsyncClient(ADDRESS) as client:
        await wait_ready(client)
        await run_once(client, options)  # warms up
        before = _processor_seconds(pid)
        rounds = sum([(await run_once(client, options))["rounds"] for _ in range(3)])
        return (_processor_seconds(pid) - before) * 1000 / rounds


def _processor_seconds(pid: int) -> float:
    """Processor time of all threads of a process so far."""
    threads = Path(f"/proc/{pid}/task").iterdir()
    return sum(int((thread / "schedstat").read_text().split()[0]) for thread in threads) / 1e9


if __name__ == "__main__":
    main()
