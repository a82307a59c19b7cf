"""Measures everything about one GPU in one run: rates, kernels, steps, drafts, whole answers, and profiles.

    python -m benchmarks.gpu --output FOLDER [--minutes 8] [--parts device,kernels,target]
    python -m benchmarks.gpu --output FOLDER --rehearse     (a dry run on a CPU, with tiny models)

For a machine that is available for minutes only. Each part is a process that writes its results to FOLDER at once, so
a failure loses nothing. A part is skipped if too little time is left. Models are random, with well-known shapes; the
draft of the pair that answers prompts agrees on 70% of tokens. Times are medians of steps captured as CUDA graphs. On
a CPU, kernels are interpreted, which tests them but says nothing about their speed.

Parts: `device`: versions, bandwidth, GEMM rate; `kernels`: errors against float64, and batch invariance; `target`:
steps with each GEMM backend, beside the time to read weights and cache once; `draft`: drafts of 4 tokens; `pair`:
answers of the whole service; `transformers`: `generate` with the same target; `profile`: the kernels of a step and the
gaps between them. Prints JSON as the last line. Exits with status 1 if a part failed.
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
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu.part import TINY_SHAPES, Row, Settings
from benchmarks.report import console, finish, gpu_figure, output_folder, show
from benchmarks.shapes import SHAPES
from specpool.engine.config.devices import pick_device
from specpool.engine.config.sources import UnsupportedModelError

ROOT = Path(__file__).parents[2]
DTYPES = ("bfloat16", "float16", "float32")
# A part starts nothing new after this share of its time, and gets these seconds at the end to stop its processes.
WORKING, ENDING = 0.9, 15
# Rows of a table to print.
SHOWN_ROWS = 40
Results = Mapping[str, Mapping[str, Any]]


# The minimum and maximum seconds of each part: it is skipped below the first, and stopped after the second.
PARTS = {
    "device": (10, 60), "kernels": (30, 150), "target": (45, 150), "draft": (30, 90), "pair": (90, 210),
    "transformers": (40, 100), "profile": (30, 100),
}  # fmt: skip


def main() -> None:
    """Parse the command line, run the parts, print the results."""
    options = parse()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))
    began = time.monotonic()
    results: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory(prefix="specpool-gpu-") as scratch:
        for name in options.parts:
            results[name] = run(name, options, scratch, began + 60 * options.minutes)
    for name, result in results.items():
        show_part(name, result)
    reached = goals(results)
    show("goals", reached)
    report = {
        "device": options.device, "dtype": options.dtype, "target": options.target, "draft": options.draft,
        "rehearsed": options.rehearse, "seconds": round(time.monotonic() - began, 1), "goals": reached,
        "parts": results,
    }  # fmt: skip
    gpu_figure(results).savefig(options.output / "gpu.png", dpi=110)
    finish("gpu", report, None)  # the parts have written their files
    if failed := [name for name, result in results.items() if "error" in result]:
        raise SystemExit(f"failed: {', '.join(failed)}")


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Options of the command line."""
    parser = argparse.ArgumentParser(
        "python -m benchmarks.gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=output_folder, required=True, help="folder for the results and the plot")
    parser.add_argument("--minutes", type=_minutes, default=8.0, help="time for all parts together")
    parser.add_argument("--parts", type=_parts, default=list(PARTS), metavar="A,B,...", help="default: all")
    parser.add_argument("--rehearse", action="store_true", help="tiny models; default device: cpu, in float32")
    parser.add_argument("--device", help="default: cuda")
    parser.add_argument("--dtype", choices=DTYPES, help="default: bfloat16")
    shapes = {**SHAPES, **TINY_SHAPES}
    parser.add_argument("--target", choices=shapes, help="default: qwen3-8b")
    parser.add_argument("--draft", choices=shapes, help="default: qwen3-0.6b")
    options = parser.parse_args(arguments)
    defaults = ("cpu", "float32", *TINY_SHAPES) if options.rehearse else ("cuda", "bfloat16", "qwen3-8b", "qwen3-0.6b")
    for name, value in zip(("device", "dtype", "target", "draft"), defaults, strict=True):
        setattr(options, name, getattr(options, name) or value)
    target_size, draft_size = (shapes[name]["vocab_size"] for name in (options.target, options.draft))
    if target_size != draft_size:
        parser.error(f"--draft: its vocabulary has {draft_size} tokens, the target's {target_size}")
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


# --- Processes


def run(name: str, options: argparse.Namespace, scratch: str, end: float) -> dict[str, Any]:
    """Run a part. Return its result, including why it was skipped or failed, and write it to the part's file."""
    file, began, (minimum, maximum) = options.output / f"{name}.json", time.monotonic(), PARTS[name]
    file.unlink(missing_ok=True)  # of an earlier run
    left = end - began
    result: dict[str, Any] = {}
    if left < minimum:
        result["skipped"] = f"needs {minimum} s, but {max(0.0, left):.0f} s were left"
    else:
        seconds = min(left, maximum)
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
    status = result.get("error") or result.get("skipped") or "done"
    now = time.monotonic()
    console.print(f"{name}: {status} ({now - began:.0f} s; {(end - now) / 60:.1f} minutes left)")
    return result


def run_process(command: list[str], environment: Mapping[str, str], seconds: float) -> str | None:
    """Run a process for at most this long, with its output on standard error. Return why it failed.

    `environment`: variables to add to ours.
    """
    process = subprocess.Popen(command, cwd=ROOT, env={**os.environ, **environment}, stdout=2, process_group=0)
    try:
        status = process.wait(seconds)
    except subprocess.TimeoutExpired:
        return f"not done after {seconds:.0f} s"
    finally:
        end_process(process)
    return None if status == 0 else f"exited with status {status}"


def end_process(process: subprocess.Popen[bytes]) -> None:
    """Terminate a process, and kill its process group if that takes too long."""
    if process.poll() is not None:
        return
    process.terminate()
    try:
        process.wait(ENDING)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


# --- Results


def show_part(name: str, result: Mapping[str, Any]) -> None:
    """Print the facts of a part, then its lists of rows."""
    facts = {key: value for key, value in result.items() if isinstance(value, str | int | float | bool)}
    show(name, [{"fact": key, "value": value} for key, value in facts.items()])
    for title, rows in result.items():
        if isinstance(rows, list) and rows and isinstance(rows[0], dict):
            show(f"{name}: {title.replace('_', ' ')}", rows[:SHOWN_ROWS])
    show(f"{name}: notes", [{"note": note} for note in result.get("notes", ())])


def goals(results: Results) -> list[Row]:
    """Compare the worst measured cases with what a GPU of the H200 class should reach."""
    steps = [row for row in results.get("target", {}).get("steps", ()) if row["backend"] == "chosen"]
    drafts = results.get("draft", {}).get("drafts", ())
    runs = results.get("pair", {}).get("runs", ())

    def of_steps(what: str, sequences: int, drafted: bool) -> list[float]:
        return [row[what] for row in steps if (row["sequences"], row["drafted"] > 0) == (sequences, drafted)]

    def goal(name: str, values: Iterable[float | None], at_least: float = -math.inf, at_most: float = math.inf) -> Row:
        known = [value for value in values if value is not None]
        worst: Callable[..., float | None] = min if math.isfinite(at_least) else max
        measured = worst(known, default=None)
        met = None if measured is None else at_least <= measured <= at_most
        target = f">= {at_least:g}" if math.isfinite(at_least) else f"<= {at_most:g}"
        return {"goal": name, "target": target, "measured": measured, "met": met}

    speedups = [row["ratio"] for row in runs if (row["kind"], row["concurrency"]) == ("adaptive", 8)]
    draft_ms = [row["ms"] for row in drafts if row["sequences"] == 8]
    return [
        goal("share of the limit, step of 1", of_steps("of_limit", 1, False), at_least=0.7),
        goal("share of the limit, step of 8", of_steps("of_limit", 8, False), at_least=0.7),
        goal("verification of 8 x 5 rows, of a plain step", of_steps("over_plain", 8, True), at_most=1.1),
        goal("passes of 64 x 5 rows", of_steps("passes", 64, True), at_most=1),
        goal("draft of 4 tokens for 8, ms", draft_ms, at_most=4),
        goal("adaptive of plain, 8 at a time", speedups, at_least=2),
        goal("exact match", [row["exact_match"] for row in runs], at_least=1),
    ]


if __name__ == "__main__":
    main()
