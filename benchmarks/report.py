"""Shared by all benchmarks: options, progress, tables on stderr, plots, and a last line of JSON on stdout."""

import argparse
import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from matplotlib.figure import Figure
from rich.console import Console
from rich.progress import track
from rich.table import Table

from benchmarks.provenance import describe_run

console = Console(stderr=True, width=None if sys.stderr.isatty() else 120)
T = TypeVar("T")
MAX_DIGITS = 100  # Python refuses to convert thousands of digits
MIN_PASS_MS, MAX_MS = 0.001, 60_000.0


def parser_of(description: str | None, **options: Any) -> argparse.ArgumentParser:
    """A parser whose help is the docstring of a benchmark."""
    return argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter, **options
    )


def output_folder(name: str) -> Path:
    """Argument type: a folder. It is created at once, so a wrong path fails before the work."""
    folder = Path(name)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise argparse.ArgumentTypeError(f"{name} cannot be a folder: {error.strerror}") from None
    return folder


def whole(minimum: int, maximum: int) -> Callable[[str], int]:
    """Argument type: an integer within these limits."""

    def parsed(text: str) -> int:
        if not text.isdecimal() or len(text) > MAX_DIGITS or not minimum <= int(text) <= maximum:
            raise argparse.ArgumentTypeError(f"{text!r} is not an integer from {minimum} to {maximum}")
        return int(text)

    return parsed


def wholes(minimum: int, maximum: int) -> Callable[[str], list[int]]:
    """Argument type: integers within these limits, separated by commas."""
    return lambda text: [whole(minimum, maximum)(number) for number in text.split(",")]


def real(minimum: float, maximum: float) -> Callable[[str], float]:
    """Argument type: a number within these limits."""

    def parsed(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not minimum <= value <= maximum:
            raise argparse.ArgumentTypeError(f"{text!r} is not a number from {minimum:g} to {maximum:g}")
        return value

    return parsed


chance = real(0, 1)
milliseconds = real(0, MAX_MS)


class PassMs(argparse.Action):
    """Stores the milliseconds of a pass: for its first row, and for each further row."""

    def __init__(self, option_strings: Sequence[str], dest: str, **options: Any) -> None:
        super().__init__(option_strings, dest, nargs=2, type=milliseconds, metavar=("FIRST", "MORE"), **options)

    def __call__(self, parser: Any, namespace: argparse.Namespace, values: Any, option_string: Any = None) -> None:
        if values[0] < MIN_PASS_MS:
            raise argparse.ArgumentError(self, f"the first row takes {values[0]:g} ms, less than {MIN_PASS_MS:g}")
        setattr(namespace, self.dest, values)


def progress(things: Sequence[T], what: str) -> Iterable[T]:
    """Iterates over the things with a progress bar."""
    return track(things, what, console=console, transient=True)


def seconds_of(work: Callable[[], object]) -> float:
    """Seconds of one call."""
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def median(runs: Iterable[Mapping[str, Any]], name: str) -> float | None:
    """The median of a measure over all runs that have it; None without such runs."""
    values = [run[name] for run in runs if run.get(name) is not None]
    return statistics.median(values) if values else None


def percentile(values: list[float], share: float) -> float | None:
    """The smallest value that at least this share of the values does not exceed; None without values."""
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)] if values else None


def show(title: str, rows: Sequence[Mapping[str, Any]]) -> None:
    """Print a table; the first row's keys are its columns."""
    if not rows:
        return
    table = Table(*(name.replace("_", " ") for name in rows[0]), title=title)
    for row in rows:
        table.add_row(*("" if value is None else str(value) for value in row.values()))
    console.print(table)


def finish(name: str, result: Mapping[str, Any], folder: Path | None, figure: Figure | None = None) -> None:
    """Print the result as one line of JSON, with a `run` entry; with a folder, also save it and the figure there."""
    result = {"run": describe_run(), **result}
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{name}.json").write_text(json.dumps(result, indent=1) + "\n")
        if figure is not None:
            figure.savefig(folder / f"{name}.png", dpi=110)
    print(json.dumps(result))


def realign_figure(rows: list[dict[str, Any]]) -> Figure:
    """Speed relative to plain decoding, and the share of realignment, by batch."""
    figure = Figure(figsize=(9.5, 3.8), layout="constrained")
    speed, share = figure.subplots(1, 2)
    kinds = dict.fromkeys(row["decoding"] for row in rows)
    for kind in kinds:
        selected = [row for row in rows if row["decoding"] == kind]
        batches = [row["batch"] for row in selected]
        style = {"marker": "o", "linestyle": "--" if "padded" in kind else "-"}
        if kind != "plain":
            speed.plot(batches, [row["of_plain"] for row in selected], label=kind, **style)
        if "/" in kind:
            share.plot(batches, [100 * row["realign_share"] for row in selected], label=kind, **style)
    speed.axhline(1, color="gray", linewidth=1)
    speed.set(xscale="log", xlabel="batch", ylabel="tokens/s, relative to plain decoding here", ylim=(0, None))
    share.set(xscale="log", xlabel="batch", ylabel="realignment, % of a round", ylim=(0, None))
    batches = sorted({row["batch"] for row in rows})
    for axes in (speed, share):
        axes.set_xticks(batches, labels=map(str, batches))
        axes.minorticks_off()
        axes.legend(fontsize="x-small")
    return figure


def throughput_figure(rows: list[dict[str, Any]]) -> Figure:
    """Speed relative to plain decoding by concurrency, with a line for each kind; bars span the repeats."""
    figure = Figure(figsize=(7, 4.2), layout="constrained")
    axes = figure.subplots()
    mixed = [row for row in rows if row["category"] is None and row["kind"] != "plain"]
    for kind in dict.fromkeys(row["kind"] for row in mixed):
        selected = [row for row in mixed if row["kind"] == kind]
        ratios = [row["ratio"] for row in selected]
        below = [row["ratio"] - row["ratio_min"] for row in selected]
        above = [row["ratio_max"] - row["ratio"] for row in selected]
        concurrencies = [row["concurrency"] for row in selected]
        style = "o--" if kind.startswith("k") else "o-"
        axes.errorbar(concurrencies, ratios, [below, above], fmt=style, capsize=2, label=kind)
    axes.axhline(1, color="gray", linewidth=1)
    axes.set(xscale="log", xlabel="requests at a time", ylabel="tokens/s, relative to plain decoding", ylim=(0, None))
    concurrencies = sorted({row["concurrency"] for row in mixed})
    axes.set_xticks(concurrencies, labels=map(str, concurrencies))
    axes.minorticks_off()
    if mixed:
        axes.legend(fontsize="x-small", ncols=2)
    return figure


TICKS_MS = (10, 20, 50, 100, 200, 500)


def engine_figure(rows: list[dict[str, Any]]) -> Figure:
    """Milliseconds of plain and verify steps by sequences and cached length, with the limit and transformers."""
    figure = Figure(figsize=(9.5, 3.8), layout="constrained")
    plain, verify = figure.subplots(1, 2)
    lengths = sorted({row["cached"] for row in rows})
    for color, length in enumerate(lengths):
        selected = [row for row in rows if row["cached"] == length]
        for name, style in (("plain_ms", "-"), ("limit_ms", ":"), ("transformers_ms", "--"), ("verify_ms", "-")):
            axes = verify if name == "verify_ms" else plain
            measured = [row for row in selected if row[name] is not None]
            label = f"{length} cached" if style == "-" else None
            points = [row["sequences"] for row in measured], [row[name] for row in measured]
            axes.plot(*points, color=f"C{color}", linestyle=style, marker="o", label=label)
    plain.set(title="plain; dashed: transformers, dotted: reading all once")
    verify.set(title="verify, 4 draft tokens each")
    batches = sorted({row["sequences"] for row in rows})
    for axes in (plain, verify):
        axes.set(xscale="log", yscale="log", xlabel="sequences", ylabel="ms a step")
        axes.set_xticks(batches, labels=map(str, batches))
        axes.set_yticks(TICKS_MS, labels=map(str, TICKS_MS))
        axes.minorticks_off()
        axes.legend(fontsize="x-small")
    return figure


def gpu_figure(results: Mapping[str, Mapping[str, Any]]) -> Figure:
    """Steps and verifications as shares of their limit; tokens/s relative to plain decoding, by concurrency."""
    figure = Figure(figsize=(9.5, 3.8), layout="constrained")
    steps, speed = figure.subplots(1, 2)
    rows = results.get("steps", {}).get("steps", ())
    for drafted in dict.fromkeys(row["drafted"] for row in rows):
        selected = [row for row in rows if row["drafted"] == drafted]
        names = [f"{row['sequences']}\n{row['cached']}" for row in selected]
        steps.plot(names, [row["of_limit"] for row in selected], "o", label=f"{drafted + 1} rows per sequence")
    steps.set(xlabel="sequences, cached", ylabel="limit / time of a step", ylim=(0, None))
    steps.tick_params(axis="x", labelsize="xx-small")
    runs = [row for row in results.get("pair", {}).get("runs", ()) if row["kind"] != "plain"]
    for kind in dict.fromkeys(row["kind"] for row in runs):
        selected = [row for row in runs if row["kind"] == kind]
        speed.plot([str(row["concurrency"]) for row in selected], [row["ratio"] for row in selected], "o-", label=kind)
    speed.axhline(1, color="gray", linewidth=1)
    speed.set(xlabel="requests at a time", ylabel="tokens/s, relative to plain decoding", ylim=(0, None))
    for axes, lines in ((steps, rows), (speed, runs)):
        if lines:
            axes.legend(fontsize="x-small")
    return figure


def devices_figure(rows: list[dict[str, Any]]) -> Figure:
    """Shares of the bounds and of the target's time, by the number of sequences."""
    figure = Figure(figsize=(7, 4.2), layout="constrained")
    axes, counts = figure.subplots(), [row["sequences"] for row in rows]
    for measure, style in (("of_bound", "o-"), ("busy", "o--")):
        for kind in ("plain", "default"):
            axes.plot(
                counts, [row[f"{kind}_{measure}"] for row in rows], style, label=f"{kind}, {measure}".replace("_", " ")
            )
    axes.set(xscale="log", xlabel="requests at a time", ylabel="share", ylim=(0, 1))
    axes.set_xticks(counts, labels=map(str, counts))
    axes.minorticks_off()
    axes.legend(fontsize="small")
    return figure
