"""Everything about one GPU in one run: its rates, every kernel, steps, drafts, whole answers, and where time goes.

    python -m benchmarks.gpu --output FOLDER [--minutes 8] [--parts device,kernels,target]
    python -m benchmarks.gpu --output FOLDER --rehearse     (on a CPU, with tiny models, to see that it runs to its end)

Made for a machine that is lent for minutes: each part is a process of its own and keeps its results in FOLDER as it
finds them, so that nothing is lost by what fails, hangs or is cut off. A part for which too little time is left is
skipped. Models are random ones of well-known shapes; of the pair that answers prompts, the draft is right 70% of the
time. Times are medians; steps are recorded as CUDA graphs before they are timed. On a CPU, kernels are interpreted,
which says whether they run and nothing about their speed, and engines run their pass for CPUs.

Parts: `device`: versions, bandwidth, rate of products; `kernels`: errors against float64, and whether a row has the
same bits alone and among others; `target`: steps beside the time that reading weights and cache once would take, for
each kind of products; `draft`: drafts of 4 tokens; `pair`: answers by the whole service; `transformers`: `generate`
with the same target; `profile`: kernels of a step, and the gaps between them. The last line printed is JSON. The exit
status is 1 if a part failed.
"""

import argparse
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.figures import gpu_figure
from benchmarks.gpu.part import TINY_SHAPES, Settings
from benchmarks.gpu.report import goals, show_part
from benchmarks.report import console, finish, output_folder, show
from benchmarks.shapes import SHAPES
from specpool.engine.config.devices import pick_device
from specpool.engine.config.sources import UnsupportedModelError

ROOT = Path(__file__).parents[2]
DTYPES = ("bfloat16", "float16", "float32")
# A part begins nothing more after this share of its time. After all of it, it has these seconds to end its processes.
WORKING, ENDING = 0.9, 15


@dataclass(frozen=True)
class Budget:
    """Seconds of a part: with fewer than `least` it is left out, and it never gets more than `most`."""

    least: float
    most: float


PARTS = {
    "device": Budget(10, 60), "kernels": Budget(30, 150), "target": Budget(45, 150), "draft": Budget(30, 90),
    "pair": Budget(90, 210), "transformers": Budget(40, 100), "profile": Budget(30, 100),
}  # fmt: skip


def main() -> None:
    """Parses the command line, runs the parts, prints."""
    options = parse()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))
    began = time.monotonic()
    results: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory(prefix="specpool-gpu-") as scratch:
        for name in options.parts:
            results[name] = run(name, options, scratch, began + 60 * options.minutes)
    for name in results:
        show_part(name, results)
    reached = goals(results)
    show("goals", reached)
    whole = {
        "device": options.device, "dtype": options.dtype, "target": options.target, "draft": options.draft,
        "rehearsed": options.rehearse, "seconds": round(time.monotonic() - began, 1), "goals": reached,
        "parts": results,
    }  # fmt: skip
    gpu_figure(results).savefig(options.output / "gpu.png", dpi=110)
    finish("gpu", whole, None)  # each part's file is there already
    if failed := [name for name, result in results.items() if "error" in result]:
        raise SystemExit(f"failed: {', '.join(failed)}")


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Options of the command line."""
    parser = argparse.ArgumentParser(
        "python -m benchmarks.gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=output_folder, required=True, help="folder for the results and the plot")
    parser.add_argument("--minutes", type=_minutes, default=8.0, help="time for all parts together")
    parser.add_argument("--parts", type=_parts, default=list(PARTS), metavar="A,B,...", help="by default all")
    parser.add_argument("--rehearse", action="store_true", help="tiny models; by default on a CPU, in float32")
    parser.add_argument("--device", help="default: cuda")
    parser.add_argument("--dtype", choices=DTYPES, help="default: bfloat16")
    shapes = {**SHAPES, **TINY_SHAPES}
    parser.add_argument("--target", choices=shapes, help="default: qwen3-8b")
    parser.add_argument("--draft", choices=shapes, help="default: qwen3-0.6b")
    options = parser.parse_args(arguments)
    usual = ("cpu", "float32", *TINY_SHAPES) if options.rehearse else ("cuda", "bfloat16", "qwen3-8b", "qwen3-0.6b")
    for name, value in zip(("device", "dtype", "target", "draft"), usual, strict=True):
        setattr(options, name, getattr(options, name) or value)
    vocabulary = [shapes[name]["vocab_size"] for name in (options.target, options.draft)]
    if vocabulary[0] != vocabulary[1]:
        parser.error(f"--draft: its vocabulary has {vocabulary[1]} tokens, the target's {vocabulary[0]}")
    try:
        options.device = str(pick_device(options.device))
    except UnsupportedModelError as error:
        parser.error(f"--device: {error}")
    options.output = options.output.resolve()
    return options


def _minutes(text: str) -> float:
    minutes = float(text)
    if not 0 < minutes < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is not a number of minutes")
    return minutes


def _parts(text: str) -> list[str]:
    named = set(text.split(","))
    if unknown := named - PARTS.keys():
        raise argparse.ArgumentTypeError(f"unknown: {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}")
    return [name for name in PARTS if name in named]


def run(name: str, options: argparse.Namespace, scratch: str, end: float) -> dict[str, Any]:
    """The result of a part, which is also kept: what its process found, why it ended early, or why it did not begin."""
    file, began, budget = options.output / f"{name}.json", time.monotonic(), PARTS[name]
    file.unlink(missing_ok=True)  # of an earlier run
    left = end - began
    result: dict[str, Any] = {}
    if left < budget.least:
        result["skipped"] = f"needs {budget.least:.0f} s, and {max(0.0, left):.0f} s were left"
    else:
        seconds = min(left, budget.most)
        settings = Settings(
            options.device, options.dtype, options.target, options.draft, options.rehearse, str(options.output),
            scratch, deadline=began + WORKING * seconds,
        )  # fmt: skip
        environment = {"TRITON_INTERPRET": "1"} if options.device == "cpu" else {}
        command = [sys.executable, "-m", "benchmarks.gpu.part", name, settings.as_argument()]
        failure = run_process(command, environment, seconds)
        if file.exists():
            result = json.loads(file.read_text())
        if failure is not None:
            result.setdefault("error", failure)
        result["seconds"] = round(time.monotonic() - began, 1)
    file.write_text(json.dumps(result, indent=1) + "\n")
    said = result.get("error") or result.get("skipped") or "done"
    now = time.monotonic()
    console.print(f"{name}: {said} ({now - began:.0f} s; {(end - now) / 60:.1f} minutes left)")
    return result


def run_process(command: list[str], environment: Mapping[str, str], seconds: float) -> str | None:
    """Runs a process; why it failed, None if it did not. It is ended after this time, and if we are.

    `environment`: what is added to ours. What the process prints goes to standard error.
    """
    process = subprocess.Popen(command, cwd=ROOT, env={**os.environ, **environment}, stdout=2, process_group=0)
    try:
        status = process.wait(seconds)
    except subprocess.TimeoutExpired:
        return f"it was not done after {seconds:.0f} s"
    finally:
        end_process(process)
    return None if status == 0 else f"its process ended with status {status}"


def end_process(process: subprocess.Popen[bytes]) -> None:
    """Asks a process to end, and kills it with all that it started if that takes too long."""
    if process.poll() is not None:
        return
    process.terminate()
    try:
        process.wait(ENDING)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


if __name__ == "__main__":
    main()
