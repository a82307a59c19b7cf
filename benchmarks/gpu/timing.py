"""Times of work on a device, and rates of the device."""

import statistics
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch

from benchmarks.engine import finished
from benchmarks.gpu.part import Settings
from benchmarks.report import seconds_of
from specpool.engine.passes.gpu.graphs import CudaGraphs


def seconds_each(settings: Settings, work: Callable[[], object]) -> float:
    """Median seconds of work that runs several times in a row."""

    def row() -> None:
        for _ in range(settings.sizes.in_a_row - 1):
            work()
        finished(work)

    row()
    return statistics.median(seconds_of(row) for _ in range(settings.sizes.repeats)) / settings.sizes.in_a_row


def captured_microseconds(settings: Settings, calls: Sequence[Callable[[], torch.Tensor]]) -> float:
    """Median microseconds of a call, captured together as in a pass."""

    def run() -> torch.Tensor:
        results = [call() for call in calls]
        return results[-1]

    run()  # compiles
    is_captured = torch.device(settings.device).type == "cuda"
    timed: Callable[[], object] = CudaGraphs()(run)[0] if is_captured else run
    return round(seconds_each(settings, timed) / len(calls) * 1e6, 1)


def bandwidths(settings: Settings) -> Iterator[tuple[str, float]]:
    """Bytes per second when reading memory, and when copying it (read plus written)."""
    size = settings.sizes.moved_bytes
    source = torch.ones(size // 4, device=settings.device)
    yield "read_gb_s", size / seconds_each(settings, source.sum)
    target = torch.empty_like(source)
    yield "copy_gb_s", 2 * size / seconds_each(settings, partial(target.copy_, source))


def gemm_rate(settings: Settings) -> float:
    """Operations per second of a large GEMM."""
    size = settings.sizes.gemm
    a, b = settings.randn(2, size, size)
    return 2 * size**3 / seconds_each(settings, lambda: a @ b)
