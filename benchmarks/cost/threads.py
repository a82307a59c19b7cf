"""Compare numbers of CPU threads of the workers beside busy processes, with one demo for each choice.

    python -m benchmarks.cost --of threads --threads 1,2 --neighbours 0,1,2

Runs of all choices are interleaved; the table shows medians.
"""

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from benchmarks.report import finish, parser_of, progress, show, whole, wholes
from specpool.cli.processes import SPIN_COUNT
from specpool.environment.cpus import usable_cpus

MEASURES = ("plain_tokens_per_s", "speculative_tokens_per_s")
Choice = tuple[int, int, int]


def main(arguments: Sequence[str]) -> None:
    """Parse the command line, measure and print."""
    cores = usable_cpus()
    parser = parser_of(__doc__, prog="python -m benchmarks.cost --of threads")
    parser.add_argument("--threads", type=wholes(1, 1024), default=sorted({max(1, cores // 2), cores}))
    parser.add_argument("--neighbours", type=wholes(0, 1024), default=[0], help="numbers of busy processes beside it")
    parser.add_argument(
        "--spin-counts", type=wholes(0, 10**12), default=[int(SPIN_COUNT)],
        help="iterations for which torch's waiting threads spin before they sleep",
    )  # fmt: skip
    parser.add_argument("--repeats", type=whole(1, 1000), default=3)
    parser.add_argument("--num-prompts", type=whole(1, 1000), default=8)
    parser.add_argument("--max-tokens", type=whole(1, 1000), default=32)
    parser.add_argument("--limit-seconds", type=float, default=120, help="a slower demo counts as 0 tokens/s")
    options = parser.parse_args(arguments)
    choices = [*itertools.product(options.neighbours, options.threads, options.spin_counts)]
    runs: dict[Choice, list[dict[str, Any]]] = {choice: [] for choice in choices}
    for count, threads, spin in progress(choices * options.repeats, "demos"):
        with neighbours(count):
            runs[count, threads, spin].append(_demo(threads, spin, options))
    rows = [
        {"neighbours": count, "threads": threads, "spin_count": spin}
        | {name: statistics.median(run[name] for run in found) for name in MEASURES}
        for (count, threads, spin), found in runs.items()
    ]
    show(f"two workers on {cores} cores, tokens/s", rows)
    finish("threads", {"cores": cores, "choices": rows}, None)


@contextmanager
def neighbours(count: int) -> Iterator[None]:
    """Run processes that never wait, one thread each."""
    processes = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def _demo(threads: int, spin: int, options: argparse.Namespace) -> dict[str, Any]:
    flags = ["--threads", str(threads), "--repeats", "1", "--num-prompts", str(options.num_prompts)]
    command = [sys.executable, "-m", "specpool.cli.main", "demo", *flags, "--max-tokens", str(options.max_tokens)]
    environment = {**os.environ, "GOMP_SPINCOUNT": str(spin)}
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as demo:
        try:
            out, _ = demo.communicate(timeout=options.limit_seconds)
        except subprocess.TimeoutExpired:
            demo.terminate()
            return dict.fromkeys(MEASURES, 0.0)
    result: dict[str, Any] = json.loads(out.splitlines()[-1])
    return result
