"""What the device is, how fast it reads and copies memory, and at what rate it multiplies matrices."""

import platform
import statistics
from collections.abc import Callable, Iterator
from typing import Any

import torch
import transformers

from benchmarks.engine import finished
from benchmarks.gpu.part import Findings, Settings
from benchmarks.report import seconds_of
from specpool.engine.numerics.triton_compat import triton


def measure(settings: Settings, findings: Findings) -> None:
    """The part of `benchmarks.gpu`. The libraries are not restricted here: rates are what the device can do."""
    findings.add(**description(torch.device(settings.device)))
    findings.add(**{name: round(rate / 1e9, 1) for name, rate in bandwidths(settings)})
    findings.add(product_tflops=round(product_rate(settings) / 1e12, 2))


def description(device: torch.device) -> dict[str, Any]:
    """Names, versions and sizes."""
    versions = {
        "python": platform.python_version(), "torch": torch.__version__, "transformers": transformers.__version__,
        "triton": None if triton is None else triton.__version__, "cuda": torch.version.cuda,
    }  # fmt: skip
    if device.type != "cuda":
        return {"name": platform.machine(), **versions}
    facts = torch.cuda.get_device_properties(device)
    free, total = torch.cuda.mem_get_info(device)
    return {
        "name": facts.name, **versions, "architecture": f"sm_{facts.major}{facts.minor}",
        "processors": facts.multi_processor_count, "memory_gib": round(total / 2**30, 1),
        "free_gib": round(free / 2**30, 1),
    }  # fmt: skip


def bandwidths(settings: Settings) -> Iterator[tuple[str, float]]:
    """Bytes per second by which memory is read, and by which it is copied: those read and those written."""
    size = settings.sizes.moved_bytes
    source = torch.ones(size // 4, device=settings.device)
    yield "read_gb_s", size / seconds_each(settings, source.sum)
    target = torch.empty_like(source)
    yield "copy_gb_s", 2 * size / seconds_each(settings, lambda: target.copy_(source))


def bandwidth(settings: Settings) -> float:
    """The greater of both: what no pass exceeds."""
    return max(rate for _, rate in bandwidths(settings))


def product_rate(settings: Settings) -> float:
    """Floating-point operations per second of a large product of random matrices by the library."""
    size = settings.sizes.product
    one, other = torch.randn(2, size, size, device=settings.device).to(settings.torch_dtype)
    return 2 * size**3 / seconds_each(settings, lambda: one @ other)


def seconds_each(settings: Settings, work: Callable[[], object]) -> float:
    """Median seconds of work that the device does several times in a row."""

    def row() -> None:
        for _ in range(settings.sizes.in_a_row - 1):
            work()
        finished(work)

    row()
    return statistics.median(seconds_of(row) for _ in range(settings.sizes.repeats)) / settings.sizes.in_a_row
