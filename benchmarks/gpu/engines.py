"""Engines of random models for the GPU benchmark, times of their work, and rates of the device."""

import gc
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from benchmarks.engine import finished, weight_bytes_read
from benchmarks.gpu.part import Findings, Settings
from benchmarks.report import seconds_of
from benchmarks.shapes import random_loaded
from specpool.engine.config.options import EngineOptions
from specpool.engine.passes.gpu.captured import CapturedModel
from specpool.engine.passes.gpu.graphs import CudaGraphs
from specpool.engine.passes.gpu.model import GpuModel
from specpool.engine.run.engine import Engine
from specpool.engine.startup.loading import start_engine

# The first run of a shape may compile kernels.
WARM_UPS = 2
# Minimum seconds left to start a shape.
SHAPE_SECONDS = 5


def free_models() -> None:
    """Free the memory of models that are no longer used, on the device too. Their modules are in reference cycles."""
    gc.collect()
    torch.cuda.empty_cache()  # does nothing without CUDA


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


def start(
    settings: Settings, findings: Findings, shape: str, exact: bool, max_length: int | None = None, **changes: Any
) -> Engine:
    """An engine for a random model, with room for the largest step, and random numbers in the cache.

    `changes`: changes to the model's configuration.
    """
    torch.manual_seed(0)
    max_length = max_length or max(settings.sizes.lengths) + 16
    options = EngineOptions.model_validate({
        "model": shape, "device": settings.device, "dtype": settings.dtype, "max_model_len": max_length,
        "max_sequences": max(settings.sizes.batches),
    })  # fmt: skip
    began = time.perf_counter()
    loaded = random_loaded(shape, settings.device, settings.torch_dtype, **changes)
    made = time.perf_counter()
    loaded, drafts = replace(loaded, max_model_len=max_length), shape == settings.draft
    engine = start_engine(loaded, options, exact, drafts=drafts)
    model = gpu_model(engine)
    gemms = {} if model is None else {f"{g.out_features} x {g.in_features}": g.backends for g in model.gemms()}
    findings.add(
        model=shape, weights_made_s=round(made - began, 1), started_s=round(time.perf_counter() - made, 1),
        bitwise=engine.bitwise, notes=engine.notes, gemm_backends=gemms,
        max_num_batched_tokens=engine.max_num_batched_tokens,
    )  # fmt: skip
    for tensor in (*engine.layout.arena.keys, *engine.layout.arena.values):
        tensor.normal_()
    return engine


def gpu_model(engine: Engine) -> GpuModel | None:
    """The pass of kernels; None if the engine has another one."""
    forward_pass: Any = engine.forward_pass
    model = forward_pass.model if isinstance(forward_pass, CapturedModel) else forward_pass
    return model if isinstance(model, GpuModel) else None


def is_captured(engine: Engine) -> bool:
    return isinstance(engine.forward_pass, CapturedModel) and engine.forward_pass.num_graphs > 0


class Limit:
    """The roofline: the time to read weights and cache once, or to multiply all rows by the weights.

    In a mixture, each row reads and multiplies by `top_k` experts, chosen at random.
    """

    def __init__(self, engine: Engine, settings: Settings) -> None:
        self.bandwidth = max(rate for _, rate in bandwidths(settings))  # bytes per second
        self.operations = gemm_rate(settings)  # per second
        self._weights, self._position = weight_bytes_read(engine), engine.info().kv_bytes_per_token
        model = gpu_model(engine)
        self._experts = [] if model is None else model.experts()
        self._operations_a_row = 2 * self._read(1) / settings.torch_dtype.itemsize

    def milliseconds(self, positions: int, rows: int) -> float:
        """The limit of a pass of these rows over this many cached positions."""
        reading = (self._read(rows) + positions * self._position) / self.bandwidth
        return max(reading, rows * self._operations_a_row / self.operations) * 1000

    def _read(self, rows: int) -> float:
        """Return the mean bytes of the weights that these rows need."""
        unread = 0.0
        for each in self._experts:
            is_unread = (1 - each.routing.top_k / each.gate_up.experts) ** rows
            unread += is_unread * (each.gate_up.weight.nbytes + each.down.weight.nbytes)
        return self._weights - unread
