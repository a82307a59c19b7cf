"""How benchmarks report: tables on standard error, one JSON object as the last line, results kept in files."""

import argparse
import json
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


def output_folder(name: str) -> Path:
    """The folder of this name, made if there is none; a type of arguments, so that no result is lost after the work."""
    folder = Path(name)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise argparse.ArgumentTypeError(f"{name} cannot be a folder: {error.strerror}") from None
    return folder


def whole(least: int, most: int) -> Callable[[str], int]:
    """A type of arguments: integers within these limits."""

    def parsed(text: str) -> int:
        if not text.isdecimal() or not least <= int(text) <= most:
            raise argparse.ArgumentTypeError(f"{text!r} is not an integer from {least} to {most}")
        return int(text)

    return parsed


def add_load_arguments(parser: argparse.ArgumentParser, tokens: int) -> None:
    """Adds the load of a benchmark whose workers are fakes; by default every answer has this many tokens."""
    parser.add_argument("--sequences", type=whole(1, 256), default=8)
    parser.add_argument("--tokens", type=whole(1, 4000), default=tokens)
    parser.add_argument("--k", type=whole(0, 16), default=4)
    parser.add_argument("--repeats", type=whole(1, 1000), default=5)


def progress(things: Sequence[T], what: str) -> Iterable[T]:
    """Iterates over the things, with a progress bar."""
    return track(things, what, console=console, transient=True)


def seconds_of(work: Callable[[], object]) -> float:
    """Seconds that one call takes."""
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def median(runs: Iterable[Mapping[str, Any]], name: str) -> float | None:
    """The median of a measure over the runs that have it; None if no run has."""
    values = [run[name] for run in runs if run.get(name) is not None]
    return statistics.median(values) if values else None


def show(title: str, rows: Sequence[Mapping[str, Any]]) -> None:
    """Prints a table; the first row's keys are its columns."""
    if not rows:
        return
    table = Table(*(name.replace("_", " ") for name in rows[0]), title=title)
    for row in rows:
        table.add_row(*("" if value is None else str(value) for value in row.values()))
    console.print(table)


def finish(name: str, result: Mapping[str, Any], folder: Path | None, figure: Figure | None = None) -> None:
    """Prints the result as one line of JSON. With a folder, keeps it and the figure there as files of this name."""
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{name}.json").write_text(json.dumps(result, indent=1) + "\n")
        if figure is not None:
            figure.savefig(folder / f"{name}.png", dpi=110)
    print(json.dumps(result))
