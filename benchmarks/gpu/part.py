"""One part of `benchmarks.gpu`, in its own process: `python -m benchmarks.gpu.part NAME SETTINGS`, as JSON.

A part that fails or hangs does not affect the others, even if it breaks the CUDA context: then the process exits with
status BROKEN, and the next one continues behind the failed measurement. Each process can also configure the GPU
libraries differently: they read their settings once. Findings are written to a file immediately.
"""

import json
import pkgutil
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Self

import torch

from benchmarks.report import machine
from benchmarks.shapes import SHAPES
from specpool.engine.config.sources import first_line
from specpool.engine.numerics.triton_compat import triton
from specpool.engine.probes.kernels import TIMED_ROWS

Row = dict[str, Any]

MEASURES = {
    "preflight": "preflight:measure_preflight", "exactness": "exactness:measure_exactness",
    "mixtures": "mixtures:measure_mixtures", "hybrids": "hybrids:measure_hybrids",
    "round": "worker_rounds:measure_rounds",
    "pair": "answers:measure_pair", "generate": "generate:measure_generate",
    "rows": "kernels:measure_rows", "sampling": "kernels:measure_sampling", "attention": "kernels:measure_attention",
    "steps": "steps:measure_steps", "draft": "steps:measure_drafts", "gemm": "gemms:measure_gemms",
}  # fmt: skip
"""The function of each part, most important first."""
BROKEN = 3
"""Exit status of a process whose CUDA context is broken: every later call would fail."""


class BrokenDeviceError(Exception):
    """An error that no later call on the device survives."""


@dataclass(frozen=True)
class Sizes:
    batches: tuple[int, ...] = (1, 8, 64)
    lengths: tuple[int, ...] = (512, 2048)
    """Cached positions of each sequence of a step."""
    num_draft_tokens: int = 4
    repeats: int = 15
    in_a_row: int = 10
    """Runs to time together, to leave out their launches."""
    weights: int = 8
    """Maximum distinct weights of a shape to multiply in turn."""
    timed_rows: tuple[int, ...] = TIMED_ROWS
    # Device rates.
    moved_bytes: int = 2**31
    gemm: int = 8192
    """Rows, inputs and outputs of the GEMM whose rate is measured."""
    # Kernels.
    rows: int = 2048
    """Maximum rows whose bits are compared."""
    positions: tuple[int, ...] = (0, 63, 64, 255, 256, 257, 511, 512, 513, 1023, 1024, 1500, 2048, 8191, 8192, 9000)
    beside: int = 256
    """Tiles beside a probed row; with this many, a program handles all splits of a tile."""
    sampled: int = 64
    # Answers of whole services.
    load: int = 3
    """Prompts of a run, per request in flight."""
    max_tokens: int = 64
    runs: int = 3
    rounds: int = 16
    """Rounds of each sequence after its prefill."""


REHEARSED = Sizes(
    batches=(1, 2), lengths=(24,), repeats=2, in_a_row=1, weights=1, timed_rows=(3,), moved_bytes=2**20, gemm=64,
    rows=3, positions=(0, 20, 300), beside=3, sampled=1, load=1, max_tokens=6, runs=1,
    rounds=4,
)  # fmt: skip
TINY = {"vocab_size": 320, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
TINY_SHAPES: dict[str, dict[str, Any]] = {
    "tiny-target": {**SHAPES["qwen3-8b"], **TINY, "hidden_size": 64, "intermediate_size": 96},
    "tiny-draft": {**SHAPES["qwen3-0.6b"], **TINY, "hidden_size": 32, "intermediate_size": 64},
}


@dataclass(frozen=True)
class Settings:
    device: str
    dtype: str
    target: str
    draft: str
    rehearse: bool
    output: str
    """Folder of the results."""
    scratch: str
    """Folder that parts share, removed at the end."""
    deadline: float
    """When the part should be done, by `time.monotonic`."""

    @property
    def sizes(self) -> Sizes:
        return REHEARSED if self.rehearse else Sizes()

    @property
    def torch_dtype(self) -> torch.dtype:
        dtype: torch.dtype = getattr(torch, self.dtype)
        return dtype

    @property
    def seconds_left(self) -> float:
        return self.deadline - time.monotonic()

    def randn(self, *shape: int) -> torch.Tensor:
        """Random numbers on the device."""
        return torch.randn(*shape, device=self.device).to(self.torch_dtype)

    def until(self, deadline: float) -> Self:
        return replace(self, deadline=deadline)

    def as_argument(self) -> str:
        """The command line argument of the process."""
        return json.dumps(asdict(self))


class Findings:
    """The result of a part, in a file that is always complete JSON."""

    def __init__(self, file: Path) -> None:
        """Continue the findings of an earlier process, if there was one."""
        self._file = file
        self.result: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}

    def add(self, **facts: Any) -> None:
        self.result.update(facts)
        partial = self._file.with_suffix(".partial")
        partial.write_text(json.dumps(self.result, indent=1) + "\n")
        partial.replace(self._file)

    def add_row(self, name: str, row: Row) -> None:
        """Append a row to the list of this name."""
        self.add(**{name: [*self.result.get(name, ()), row]})

    def fits(self, settings: Settings, what: str, seconds: float) -> bool:
        """Whether enough time is left. If not, note what is left out."""
        if settings.seconds_left < seconds:
            self.add_row("left_out", {"left out": what})
            return False
        return True

    def attempt(self, settings: Settings, what: str, seconds: float, measure: Callable[[], object]) -> bool:
        """Measure something, unless time is short or an earlier process tried. Return whether it succeeded.

        Note a failure and continue. BrokenDeviceError if the device cannot continue.
        """
        if what in self.result.get("attempted", ()) or not self.fits(settings, what, seconds):
            return False
        self.add(attempted=[*self.result.get("attempted", ()), what])
        try:
            measure()
        except BrokenDeviceError:
            raise
        except Exception as error:  # a failure is a result too
            self.add_row("failed", {"failed": what, "error": describe(error)})
            if is_broken(settings.device):
                raise BrokenDeviceError(what) from error
            return False
        return True


def device_name(device: str) -> str:
    """Such as "NVIDIA H100 80GB HBM3"."""
    return torch.cuda.get_device_name(device) if torch.device(device).type == "cuda" else machine()


def is_broken(device: str) -> bool:
    """Whether an earlier CUDA error fails every later call."""
    if torch.device(device).type != "cuda":
        return False
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return True
    return False


def describe(error: Exception) -> str:
    """The type and first line of an error. The traceback goes to standard error."""
    traceback.print_exception(error)
    return f"{type(error).__name__}: {first_line(error)}"


def run(name: str, settings: Settings) -> int:
    """Measure a part. Return the exit status: 0, BROKEN, or 1 if any of it failed; the result says why."""
    findings = Findings(Path(settings.output) / f"{name}.json")
    findings.add(device=device_name(settings.device))
    try:
        pkgutil.resolve_name(f"benchmarks.gpu.{MEASURES[name]}")(settings, findings)
    except BrokenDeviceError:
        return BROKEN
    except Exception as error:  # a failure is a result too
        findings.add(error=describe(error))
    else:
        failed = findings.result.get("failed", [])
        findings.add(**({"error": f"{len(failed)} measurements failed"} if failed else {}))
    return int("error" in findings.result)


def main() -> None:
    settings = Settings(**json.loads(sys.argv[2]))
    if settings.rehearse:
        SHAPES.update(TINY_SHAPES)
    if torch.device(settings.device).type == "cpu":
        let_loops_use_arrays()
    raise SystemExit(run(sys.argv[1], settings))


def let_loops_use_arrays() -> None:
    """Let Triton before 3.7 interpret loops with NumPy from 2.5 on, which converts no array of one element to int."""
    if triton is None:
        return
    from triton.runtime import interpreter

    patch_tensor = interpreter._patch_lang_tensor

    def patch(tensor: Any, scope: Any) -> None:
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda tensor: int(tensor.handle.data.item()))

    interpreter._patch_lang_tensor = patch


if __name__ == "__main__":
    main()
