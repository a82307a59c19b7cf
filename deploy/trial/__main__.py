"""Test coordinator, draft and target on three hosts (network namespaces) under load and faults.

    python -m deploy.trial [--delay-ms 2] [--loss-percent 0.5] [--cut-seconds 10] [--output FOLDER]

Needs Linux, root, and the commands `ip`, `tc` and `openssl`. The client is a fourth host, and every hop has mutual TLS.
The kernel's netem delays and drops packets, or a userspace switch if the kernel has no netem. The models are a tiny
random pair. The trial cuts hosts off, restarts processes, and compares every answer with plain decoding on a good
network. Exit status 1: a step found a fault. The last line printed is JSON.
"""

import argparse
import asyncio
import os
import shutil
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.pair import make_tiny_pair
from benchmarks.report import console, finish, output_folder, parser_of, show
from deploy.trial.hosts import Network, TrialError, inside, network
from deploy.trial.load import Load, random_cases
from deploy.trial.services import make_deployment, running
from deploy.trial.steps import Step, Steps, leftovers
from deploy.trial.timeline import BIN_SECONDS, Event, throughput_figure
from specpool.cli.processes import ProcessFailedError
from specpool.client import AsyncClient

TOOLS = ("ip", "tc", "openssl")
TUN = Path("/dev/net/tun")
FOLDER = Path("/run/specpool-trial")
CASES = 48
"""Number of different requests."""
END_SECONDS = 120.0
"""Limit for the last requests."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Parse the command line, run the trial, and print the result."""
    options = parse(arguments)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        require(os.geteuid() == 0, "needs root, to make network namespaces")
        for tool in TOOLS:
            require(shutil.which(tool), f"needs the command {tool}")
        require(TUN.exists(), f"needs {TUN}")
        with network(options.seed) as hosts, temporary_folder(), inside("client"):
            result = asyncio.run(trial(options, hosts))
    except (TrialError, ProcessFailedError) as error:
        raise SystemExit(f"trial: {error}") from None
    except (KeyboardInterrupt, asyncio.CancelledError):
        raise SystemExit(130) from None
    steps = result["steps"]
    show(f"three hosts, {result['link']}", steps)
    events = [Event(**event) for event in result["events"]]
    finish("hosts", result, options.output, throughput_figure(result["tokens_per_s"], events))
    if result["faults"]:
        raise SystemExit(f"the trial found {len(result['faults'])} faults")


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Options of the command line."""
    parser = parser_of(__doc__, prog="python -m deploy.trial")
    parser.add_argument("--delay-ms", type=float, default=2.0, help="delay of every packet each way, 0 to 1000")
    parser.add_argument("--loss-percent", type=float, default=0.5, help="share of packets lost each way, 0 to 20")
    parser.add_argument("--cut-seconds", type=float, default=10.0, help="how long a host is cut off, 4 to 20")
    parser.add_argument("--concurrency", type=int, default=8, help="requests in flight, 1 to 32")
    parser.add_argument("--seed", type=int, default=0, help="seed of requests and of lost packets")
    parser.add_argument(
        "--log-level", choices=("info", "warning", "error"), default="error", help="log level of the processes"
    )
    parser.add_argument("--output", type=output_folder, help="folder for the result and the plot")
    options = parser.parse_args(arguments)
    limits = {"delay_ms": (0, 1000), "loss_percent": (0, 20), "cut_seconds": (4, 20), "concurrency": (1, 32)}
    for name, (minimum, maximum) in limits.items():
        if not minimum <= getattr(options, name) <= maximum:
            flag = name.replace("_", "-")
            parser.error(f"--{flag}: {getattr(options, name):g} is not from {minimum} to {maximum}")
    return options


def require(holds: object, needs: str) -> None:
    """TrialError unless a condition holds."""
    if not holds:
        raise TrialError(needs)


@contextmanager
def temporary_folder() -> Iterator[None]:
    """A folder for keys and models, readable only by root. Replaces the folder of a killed trial."""
    shutil.rmtree(FOLDER, ignore_errors=True)
    FOLDER.mkdir(mode=0o700)
    try:
        yield
    finally:
        shutil.rmtree(FOLDER)


async def trial(options: argparse.Namespace, hosts: Network) -> dict[str, Any]:
    """Run the service under load and disturbances. Return all figures."""
    task = asyncio.current_task()
    assert task is not None
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, task.cancel)
    began = time.monotonic()
    console.print("starting the service")
    deployment = make_deployment(FOLDER, *make_tiny_pair(FOLDER), options.log_level)
    async with (
        running(deployment),
        AsyncClient(deployment.address, **deployment.client_security) as client,
    ):
        load = Load(client, random_cases(CASES, options.seed))
        console.print("decoding plainly, on a good network")
        await load.decode_plainly()
        link = hosts.impair(options.delay_ms / 1000, options.loss_percent / 100)
        console.print(f"{options.delay_ms:g} ms and {options.loss_percent:g}% loss each way, by {link}")
        steps = await disturbed(load, Steps(hosts, deployment, client, load, options.cut_seconds), options.concurrency)
        faults = [*(f"{step.event.name}: {fault}" for step in steps for fault in step.faults), *load.faults]
        faults += await leftovers(client)
    hosts.cut_off([])  # updates the counts
    return {
        "link": link,
        "delay_ms": options.delay_ms,
        "loss_percent": options.loss_percent,
        "concurrency": options.concurrency,
        "seconds": round(time.monotonic() - began, 1),
        **vars(load.tally),
        "packets": vars(hosts.counts),
        "steps": [step.row for step in steps],
        "bin_s": BIN_SECONDS,
        "tokens_per_s": load.timeline.rates(steps[-1].event.ended),
        "events": [step.event.rounded for step in steps[1:-1]],
        "faults": faults,
    }


async def disturbed(load: Load, steps: Steps, concurrency: int) -> list[Step]:
    """Run all steps under load and wait for the last requests."""
    loading = load.start(concurrency)
    try:
        made = await steps.run()
        load.finish()
        async with asyncio.timeout(END_SECONDS):
            await loading
    finally:
        loading.cancel()
    return made


if __name__ == "__main__":
    main()
