"""Compare numbers of CPU threads and spin counts of the workers, with one demo for each choice.

Runs of all choices are interleaved; the table shows medians.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

from benchmarks.report import finish, parser_of, progress, show, whole
from specpool.environment.cpus import usable_cpus

SPIN_COUNTS = (0, 3_000, 30_000, 300_000, 10**12)
"""Iterations of a waiting loop before a thread sleeps. The last one practically never sleeps."""
MEASURES = ("plain_tokens_per_s", "speculative_tokens_per_s")


def main(arguments: Sequence[str]) -> None:
    """Parse the command line, measure and print."""
    parser = parser_of(__doc__, prog="python -m benchmarks.cost --of threads")
    parser.add_argument("--repeats", type=whole(1, 1000), default=3)
    parser.add_argument("--num-prompts", type=whole(1, 1000), default=8)
    parser.add_argument("--max-tokens", type=whole(1, 1000), default=32)
    parser.add_argument("--limit-seconds", type=float, default=120, help="a slower demo counts as 0 tokens/s")
    options = parser.parse_args(arguments)
    cores = usable_cpus()
    choices = [(threads, spin) for threads in sorted({max(1, cores // 2), cores}) for spin in SPIN_COUNTS]
    runs: dict[tuple[int, int], list[dict[str, Any]]] = {choice: [] for choice in choices}
    plan: list[tuple[int, int]] = choices * options.repeats
    for choice in progress(plan, "demos"):
        runs[choice].append(_demo(*choice, options))
    rows = [
        {"threads": threads, "spin_count": spin}
        | {name: statistics.median(run[name] for run in found) for name in MEASURES}
        for (threads, spin), found in runs.items()
    ]
    show(f"two workers on {cores} cores, tokens/s", rows)
    finish("threads", {"cores": cores, "choices": rows}, None)


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
