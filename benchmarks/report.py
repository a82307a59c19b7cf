"""Shared by all benchmarks: options, progress and tables on stderr, and a last line of JSON on stdout."""

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

console = Console(stderr=True, width=None if sys.stderr.isatty() else 120)
T = TypeVar("T")


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
        if not text.isdecimal() or not minimum <= int(text) <= maximum:
            raise argparse.ArgumentTypeError(f"{text!r} is not an integer from {minimum} to {maximum}")
        return int(text)

    return parsed


def wholes(minimum: int, maximum: int) -> Callable[[str], list[int]]:
    """Argument type: integers within these limits, separated by commas."""
    return lambda text: [whole(minimum, maximum)(number) for number in text.split(",")]


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
    """Prints a table; the first row's keys are its columns."""
    if not rows:
        return
    table = Table(*(name.replace("_", " ") for name in rows[0]), title=title)
    for row in rows:
        table.add_row(*("" if value is None else str(value) for value in row.values()))
    console.print(table)


def finish(name: str, result: Mapping[str, Any], folder: Path | None, figure: Figure | None = None) -> None:
    """Prints the result as one line of JSON; with a folder, also saves the result and the figure there."""
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{name}.json").write_text(json.dumps(result, indent=1) + "\n")
        if figure is not None:
            figure.savefig(folder / f"{name}.png", dpi=110)
    print(json.dumps(result))
