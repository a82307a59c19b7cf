"""Shared by all benchmarks: options, progress, tables on stderr, and a last line of JSON on stdout."""

import argparse
import json
import math
import os
import platform
import re
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, TypeVar

from matplotlib.figure import Figure
from rich.console import Console
from rich.progress import track
from rich.table import Table

PACKAGES = ("specpool", "torch", "transformers")

console = Console(stderr=True, width=None if sys.stderr.isatty() else 120)
T = TypeVar("T")
MAX_DIGITS = 100  # Python refuses to convert thousands of digits
MIN_PASS_MS, MAX_MS = 0.001, 60_000.0


def describe_run(command: str | None = None) -> dict[str, Any]:
    """The `run` entry of a result. `command`: default: the command line of this process."""
    return {
        "command": command or " ".join(["python", shlex.join(sys.orig_argv[1:])]),
        "date": datetime.now(UTC).date().isoformat(),
        "machine": machine(),
        "versions": {"python": platform.python_version(), **_versions()},
        "load_average": round(os.getloadavg()[0], 2),
    }


def machine() -> str:
    """Cores and processor, such as "2 cores of an AMD EPYC (AVX-512)"."""
    info = Path("/proc/cpuinfo")
    text = info.read_text() if info.exists() else ""
    model = re.search(r"^model name\s*: (.+)$", text, re.MULTILINE)
    name = re.sub(r"\((?:R|TM)\)| CPU| Processor| @.*", "", model[1]).strip() if model else platform.machine()
    vectors = next((label for flag, label in (("avx512f", "AVX-512"), ("avx2", "AVX2")) if flag in text), None)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return f"{cores} cores of an {name}" + (f" ({vectors})" if vectors else "")


def _versions() -> dict[str, str]:
    found = {}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


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

    def parsed(text: str) -> int:
        if not text.isdecimal() or len(text) > MAX_DIGITS or not minimum <= int(text) <= maximum:
            raise argparse.ArgumentTypeError(f"{text!r} is not an integer from {minimum} to {maximum}")
        return int(text)

    return parsed


def wholes(minimum: int, maximum: int) -> Callable[[str], list[int]]:
    return lambda text: [whole(minimum, maximum)(number) for number in text.split(",")]


def some_of(names: Iterable[str], always: Iterable[str] = ()) -> Callable[[str], list[str]]:
    """Argument type: some of the names, in the order of `names`. `always`: names that are added if not given."""
    known = list(names)

    def parsed(text: str) -> list[str]:
        named = {*always, *text.split(",")}
        if unknown := named - set(known):
            raise argparse.ArgumentTypeError(f"unknown: {', '.join(sorted(unknown))}; there are {', '.join(known)}")
        return [name for name in known if name in named]

    return parsed


def real(minimum: float, maximum: float) -> Callable[[str], float]:

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
    return track(things, what, console=console, transient=True)


def seconds_of(work: Callable[[], object]) -> float:
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
