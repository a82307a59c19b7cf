"""One part of `benchmarks.gpu`, in a process of its own: `python -m benchmarks.gpu.part NAME SETTINGS`, as JSON.

A part that fails or hangs takes no other with it, even if it leaves the GPU's context unusable, and each has settings
of its own for the GPU's libraries, which read them once. Whatever is found is in a file at once.
"""

import importlib
import json
import logging
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.shapes import SHAPES
from specpool.engine.config.sources import first_line
from specpool.engine.probes.kernels import TIMED_ROWS

Row = dict[str, Any]


@dataclass(frozen=True)
class Sizes:
    """How much is measured."""

    batches: tuple[int, ...] = (1, 8, 64)
    lengths: tuple[int, ...] = (512, 2048)
    """Cached positions of each sequence of a step."""
    drafted: int = 4
    repeats: int = 15
    in_a_row: int = 10
    """Runs that are timed together, so that their launches do not count."""
    weights: int = 8
    """Different weights of a shape that are multiplied in turn, at most."""
    timed_rows: tuple[int, ...] = TIMED_ROWS
    # What the device can do.
    moved_bytes: int = 2**31
    product: int = 8192
    """Rows, inputs and outputs of the product whose rate is measured."""
    # Kernels, each beside itself alone.
    rows: int = 2048
    positions: tuple[int, ...] = (0, 63, 64, 255, 256, 257, 511, 512, 513, 1023, 1024, 1500, 2048, 8191, 8192, 9000)
    beside: int = 256
    """Tiles beside which a row attends; with this many, a program handles all splits of a tile."""
    sampled: int = 64
    # Answers of whole services.
    load: int = 4
    """Prompts of a run, per request in flight."""
    max_tokens: int = 64
    runs: int = 3


REHEARSED = Sizes(
    batches=(1, 2), lengths=(24,), repeats=2, in_a_row=1, weights=1, timed_rows=(3,), moved_bytes=2**20, product=64,
    rows=3, positions=(0, 20, 300), beside=3, sampled=1, load=1, max_tokens=6, runs=1,
)  # fmt: skip
_TINY = {"vocab_size": 320, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
TINY_SHAPES: dict[str, dict[str, Any]] = {
    "tiny-target": {**SHAPES["qwen3-8b"], **_TINY, "hidden_size": 64, "intermediate_size": 96},
    "tiny-draft": {**SHAPES["qwen3-0.6b"], **_TINY, "hidden_size": 32, "intermediate_size": 64},
}


@dataclass(frozen=True)
class Settings:
    """What every part is given."""

    device: str
    dtype: str
    target: str
    draft: str
    rehearse: bool
    output: str
    """Folder of the results."""
    scratch: str
    """Folder of what one part leaves to another; removed in the end."""
    deadline: float
    """When the part should be done, by `time.monotonic`."""

    @property
    def sizes(self) -> Sizes:
        """How much is measured."""
        return REHEARSED if self.rehearse else Sizes()

    @property
    def torch_dtype(self) -> torch.dtype:
        """Dtype of weights and activations."""
        dtype: torch.dtype = getattr(torch, self.dtype)
        return dtype

    @property
    def seconds_left(self) -> float:
        """Seconds until the deadline."""
        return self.deadline - time.monotonic()

    def as_argument(self) -> str:
        """The argument of the process."""
        return json.dumps(asdict(self))


class Findings:
    """The result of a part, in a file that is always whole."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self.found: dict[str, Any] = {}

    def add(self, **more: Any) -> None:
        """Adds to what was found."""
        self.found.update(more)
        self._write()

    def add_row(self, name: str, row: Row) -> None:
        """Adds a row to a list of this name."""
        self.found.setdefault(name, []).append(row)
        self._write()

    def fits(self, settings: Settings, what: str, seconds: float) -> bool:
        """Whether there is time left for something that takes this long; it is named if there is not."""
        if settings.seconds_left < seconds:
            self.add_row("left_out", {"left out": what})
            return False
        return True

    def attempt(self, settings: Settings, what: str, seconds: float, measure: Callable[[], object]) -> bool:
        """Measures something that takes this long; whether that worked. If not, it is named, and the part goes on."""
        if not self.fits(settings, what, seconds):
            return False
        try:
            measure()
        except Exception as error:  # whatever it is, it is what was found
            self.add_row("failed", {"failed": what, "error": described(error)})
            return False
        return True

    def _write(self) -> None:
        partial = self._file.with_suffix(".partial")
        partial.write_text(json.dumps(self.found, indent=1) + "\n")
        partial.replace(self._file)


class _Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


@contextmanager
def log_lines(name: str) -> Iterator[list[str]]:
    """A context that collects what a logger says."""
    logger, handler = logging.getLogger(name), _Lines()
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield handler.lines
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


def described(error: Exception) -> str:
    """The type of an error and its first line. All of it goes to standard error."""
    traceback.print_exception(error)
    return f"{type(error).__name__}: {first_line(error)}"


def run(name: str, settings: Settings) -> bool:
    """Measures a part. False if it failed, in whole or in part, which its result then says."""
    findings = Findings(Path(settings.output) / f"{name}.json")
    try:
        importlib.import_module(f"benchmarks.gpu.{name}").measure(settings, findings)
    except Exception as error:  # whatever it is, it is what was found
        findings.add(error=described(error))
    else:
        failed = findings.found.get("failed", [])
        findings.add(**({"error": f"{len(failed)} measurements failed"} if failed else {}))
    return "error" not in findings.found


def main() -> None:
    """Runs the part that the command line names."""
    settings = Settings(**json.loads(sys.argv[2]))
    if settings.rehearse:
        SHAPES.update(TINY_SHAPES)
    raise SystemExit(not run(sys.argv[1], settings))


if __name__ == "__main__":
    main()
