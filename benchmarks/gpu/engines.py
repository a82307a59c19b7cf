"""Engines with random weights for the parts that measure passes, and the limits of their passes."""

import time
from dataclasses import replace
from typing import Any

import torch

from benchmarks.engine import weight_bytes_read
from benchmarks.gpu.part import Findings, Settings
from benchmarks.gpu.timing import bandwidths, gemm_rate
from benchmarks.shapes import random_loaded
from specpool.engine.config.options import EngineOptions
from specpool.engine.passes.gpu.captured import CapturedModel
from specpool.engine.passes.gpu.model import GpuModel
from specpool.engine.run.engine import Engine
from specpool.engine.startup.loading import start_engine

# The first run of a shape may compile kernels.
WARM_UPS = 2
# Minimum seconds left to start a shape.
SHAPE_SECONDS = 5


def start(
    settings: Settings, findings: Findings, shape: str, exact: bool, max_length: int | None = None
) -> Engine:  # fmt: skip
    """An engine for a random model, with room for the largest step, and random numbers in the cache."""
    torch.manual_seed(0)
    max_length = max_length or max(settings.sizes.lengths) + 16
    options = EngineOptions.model_validate({
        "model": shape, "device": settings.device, "dtype": settings.dtype, "max_model_len": max_length,
        "max_sequences": max(settings.sizes.batches),
    })  # fmt: skip
    began = time.perf_counter()
    loaded = random_loaded(shape, settings.device, settings.torch_dtype)
    made = time.perf_counter()
    engine = start_engine(replace(loaded, max_model_len=max_length), options, exact)
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
    """Whether the engine captures its passes."""
    return isinstance(engine.forward_pass, CapturedModel) and engine.forward_pass.num_graphs > 0


class Limit:
    """The roofline: the time to read weights and cache once, or to multiply all rows by the weights."""

    def __init__(self, engine: Engine, settings: Settings) -> None:
        self.bandwidth = max(rate for _, rate in bandwidths(settings))  # bytes per second
        self.operations = gemm_rate(settings)  # per second
        self._weights, self._position = weight_bytes_read(engine), engine.info().kv_bytes_per_token
        self._operations_a_row = 2 * self._weights / settings.torch_dtype.itemsize

    def milliseconds(self, positions: int, rows: int) -> float:
        """The limit of a pass of these rows over this many cached positions."""
        reading = (self._weights + positions * self._position) / self.bandwidth
        return max(reading, rows * self._operations_a_row / self.operations) * 1000
