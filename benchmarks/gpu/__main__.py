"""Measures one GPU in one run: exactness, the parts of a round, whole answers, steps, and kernels.

    python -m benchmarks.gpu --output FOLDER [--minutes 9] [--parts preflight,exactness,round] [--resume]
    python -m benchmarks.gpu --output FOLDER --rehearse     (a dry run on a CPU, with tiny models)

For a machine that is available for minutes only. Without pip and network, `make gpu-bundle` in another checkout
collects the missing packages: PYTHONPATH=build/gpu-bundle:. makes Python import them.

Each part is a process with a time limit. It writes its findings to FOLDER at once, so nothing is lost when the machine
is taken away: FOLDER/report.json holds the parts that ended, FOLDER/PART.json the running one. A part is skipped if
too little time is left. `--resume` keeps the results of FOLDER and runs what is missing.

Models are random, with well-known shapes. The draft model and the EAGLE-3 head agree with their target on 70% of
tokens. On a CPU, kernels are interpreted, which tests them but says nothing about their speed.

Parts, most important first:

preflight  packages, graph capture, bandwidth, GEMM rate
exactness  bits of logits and hidden states in all kinds of passes, launched and replayed
mixtures   the same bits and the steps of a few layers of Qwen3-30B-A3B (experts) and gpt-oss-20b (windows and sinks)
hybrids    the same of Qwen3.5-9B (gated delta nets) and LFM2-1.2B (short convolutions), also after rejected
           drafts, and the time of a prefill; drafts of Qwen3.5-0.8B
round      parts of the rounds of a target worker that carries a head or a draft model, by device and host
           clocks; its answers beside those of plain decoding
pair       answers of the whole service: a carried head, a carried draft model, and a separate draft worker
generate   the same target with `generate` of transformers
rows, sampling, attention, gemm   errors of kernels against float64, batch invariance, and times of GEMMs
steps      steps of the target, beside the time to read weights and cache once
draft      drafts of 4 tokens

The times of kernels and GEMMs are medians of work captured as CUDA graphs. A table of at most 60 lines comes last.
Exits with status 1 if a part failed.
"""

import argparse
import json
import math
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu.part import MEASURES, TINY_SHAPES, Settings
from benchmarks.gpu.processes import run_part, scratch_folder
from benchmarks.gpu.summary import print_summary
from benchmarks.report import console, describe_run, output_folder, some_of
from benchmarks.shapes import SHAPES
from specpool.engine.config.devices import pick_device
from specpool.engine.config.sources import UnsupportedModelError

DTYPES = ("bfloat16", "float16", "float32")
# The minimum and maximum seconds of each part: it is skipped below the first, and stopped after the second.
PARTS = {
    "preflight": (10, 25), "exactness": (30, 90), "mixtures": (30, 80), "hybrids": (60, 230),
    "round": (40, 140), "pair": (60, 250),
    "generate": (15, 40), "rows": (15, 40), "sampling": (15, 40), "attention": (15, 45), "steps": (20, 60),
    "draft": (15, 50), "gemm": (20, 60),
}  # fmt: skip
assert list(PARTS) == list(MEASURES)


def main() -> None:
    options = parse()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))
    began = time.monotonic()
    report = options.output / "report.json"
    results: dict[str, dict[str, Any]] = {}
    if options.resume and report.exists():
        results = json.loads(report.read_text())["parts"]
    try:
        with scratch_folder() as scratch:
            for name in options.parts:
                if "skipped" in results.get(name, {"skipped": "not run yet"}):
                    results[name] = run(name, options, scratch, began + 60 * options.minutes)
                    write_report(report, options, results)
    finally:
        print_summary(results)
    if failed := [name for name, result in results.items() if "error" in result]:
        raise SystemExit(f"failed: {', '.join(failed)}")


def run(name: str, options: argparse.Namespace, scratch: str, end: float) -> dict[str, Any]:
    file, began, (minimum, maximum) = options.output / f"{name}.json", time.monotonic(), PARTS[name]
    left = end - began
    if not options.resume:
        file.unlink(missing_ok=True)  # of an earlier run
    if left < minimum:
        result: dict[str, Any] = {"skipped": f"needs {minimum} s, but {max(0.0, left):.0f} s were left"}
    else:
        settings = Settings(
            options.device, options.dtype, options.target, options.draft, options.rehearse, str(options.output),
            scratch, deadline=end,
        )  # fmt: skip
        result = run_part(name, settings, min(left, maximum), minimum)
    status = result.get("error") or result.get("skipped") or "done"
    now = time.monotonic()
    console.print(f"{name}: {status} ({now - began:.0f} s; {(end - now) / 60:.1f} minutes left)")
    return result


def write_report(file: Path, options: argparse.Namespace, results: dict[str, dict[str, Any]]) -> None:
    """Write the results of all parts to one file, and remove the files of the parts."""
    report = {
        "run": describe_run(), "device": options.device, "dtype": options.dtype, "target": options.target,
        "draft": options.draft, "rehearsed": options.rehearse, "parts": results,
    }  # fmt: skip
    partial = file.with_suffix(".partial")
    partial.write_text(json.dumps(report, indent=1) + "\n")
    partial.replace(file)
    for name in results:
        (options.output / f"{name}.json").unlink(missing_ok=True)


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        "python -m benchmarks.gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=output_folder, required=True, help="folder for the results")
    parser.add_argument("--minutes", type=_minutes, default=9.0, help="time for all parts together")
    parser.add_argument("--parts", type=some_of(PARTS), default=list(PARTS), metavar="A,B,...", help="default: all")
    parser.add_argument("--resume", action="store_true", help="keep the results of FOLDER and run what is missing")
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


if __name__ == "__main__":
    main()
