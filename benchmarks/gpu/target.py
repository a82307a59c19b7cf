"""Steps of the target by the kind of its products, beside the time that reading weights and cache once would take."""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import torch

from benchmarks.engine import Step, engine_step, finished, weight_bytes_read
from benchmarks.gpu.device import bandwidth
from benchmarks.gpu.part import Findings, Settings, log_lines
from benchmarks.report import seconds_of
from benchmarks.shapes import random_loaded
from specpool.engine.config.options import EngineOptions
from specpool.engine.passes.gpu.captured import CapturedModel
from specpool.engine.passes.gpu.gemm import KINDS, Kind
from specpool.engine.passes.gpu.model import GpuModel
from specpool.engine.run.engine import Engine
from specpool.engine.startup.loading import start_engine

CHOSEN = "chosen"
# A shape is launched the first time that it is seen, and recorded the second time.
WARM_UPS = 4
# Seconds without which a shape is not begun.
LONGEST = 5
# Steps that are timed together.
QUEUED = 5


def measure(settings: Settings, findings: Findings) -> None:
    """The part of `benchmarks.gpu`."""
    engine = started(settings, findings, settings.target, exact=True)
    limit = Limit(engine, bandwidth(settings))
    findings.add(bandwidth_gb_s=round(limit.bandwidth / 1e9, 1))
    kinds = passes_by_kind(engine)
    for cached, batch in product(settings.sizes.lengths, settings.sizes.batches):
        steps = partial(add_rows, findings, engine, settings, kinds, cached, batch, limit)
        findings.attempt(settings, f"{batch} sequences, {cached} cached", LONGEST, steps)


def started(settings: Settings, findings: Findings, shape: str, exact: bool) -> Engine:
    """An engine for a random model, with room for the largest step and a cache of random content."""
    torch.manual_seed(0)
    longest = max(settings.sizes.lengths) + 16
    options = EngineOptions.model_validate({
        "model": shape, "device": settings.device, "dtype": settings.dtype, "max_model_len": longest,
        "max_sequences": max(settings.sizes.batches),
    })  # fmt: skip
    began = time.perf_counter()
    loaded = random_loaded(shape, settings.device, settings.torch_dtype)
    made = time.perf_counter()
    with log_lines("engine") as log:
        engine = start_engine(replace(loaded, max_model_len=longest), options, exact)
    findings.add(
        model=shape, weights_made_s=round(made - began, 1), started_s=round(time.perf_counter() - made, 1),
        bitwise=engine.bitwise, notes=engine.notes, products=chosen_products(engine),
        max_num_batched_tokens=engine.max_num_batched_tokens, log=log,
    )  # fmt: skip
    for tensor in (*engine.layout.arena.keys, *engine.layout.arena.values):
        tensor.normal_()
    return engine


def chosen_products(engine: Engine) -> dict[str, str]:
    """The kind of the products of each shape, outputs x inputs."""
    its = kernels_of(engine)
    products = [] if its is None else its.products()
    return {f"{product.out_features} x {product.in_features}": product.kind for product in products}


def kernels_of(engine: Engine) -> GpuModel | None:
    """The pass of kernels; None if the engine has another one."""
    its: Any = engine.forward_pass
    model = its.model if isinstance(its, CapturedModel) else its
    return model if isinstance(model, GpuModel) else None


def is_recorded(engine: Engine) -> bool:
    """Whether the passes of an engine are recorded."""
    its: Any = engine.forward_pass
    return isinstance(its, CapturedModel) and its.capture is not None


def passes_by_kind(engine: Engine) -> dict[str, Callable[[], None]]:
    """What makes the engine use one kind for all products, or those that were chosen; recordings are kept apart."""
    model, record = kernels_of(engine), None
    if model is None:
        return {CHOSEN: lambda: None}
    if isinstance(engine.forward_pass, CapturedModel):
        record = engine.forward_pass.capture
    products = model.products()

    def use(kinds: Sequence[Kind], forward_pass: CapturedModel | GpuModel) -> None:
        for its, kind in zip(products, kinds, strict=True):
            its.kind = kind
        engine.forward_pass = forward_pass

    kinds: dict[str, list[Kind]] = {CHOSEN: [its.kind for its in products]}
    kinds |= {kind: [kind] * len(products) for kind in KINDS}
    return {
        name: partial(use, its, model if record is None else CapturedModel(model, record))
        for name, its in kinds.items()
    }


class Limit:
    """The time to read weights and cache once."""

    def __init__(self, engine: Engine, bandwidth: float) -> None:
        """`bandwidth`: bytes per second."""
        self.bandwidth = bandwidth
        self._weights, self._position = weight_bytes_read(engine), engine.info().kv_bytes_per_token

    def milliseconds(self, positions: int) -> float:
        """Of a pass over this many cached positions."""
        return (self._weights + positions * self._position) / self.bandwidth * 1000


def add_rows(
    findings: Findings, engine: Engine, settings: Settings, kinds: dict[str, Callable[[], None]], cached: int,
    batch: int, limit: Limit,
) -> None:  # fmt: skip
    """Adds a row for each kind of products: of a plain step, and of a verification of drafts."""
    steps = {count: engine_step(engine, batch, cached, count) for count in (1, 1 + settings.sizes.drafted)}
    what = f"{batch} sequences, {cached} cached, products"
    kinds = {
        kind: use for kind, use in kinds.items()
        if findings.attempt(settings, f"{what} {kind}", LONGEST, partial(warm_up, use, list(steps.values())))
    }  # fmt: skip
    found: dict[tuple[str, int], list[tuple[float, float]]] = {(kind, count): [] for kind in kinds for count in steps}
    for _ in range(settings.sizes.repeats):
        for kind, use in kinds.items():
            use()
            for count, step in steps.items():
                found[kind, count].append((seconds_of(partial(finished, step)), queued(step)))
    recorded = {}
    for kind, use in reversed(kinds.items()):  # at last those that were chosen
        use()
        recorded[kind] = is_recorded(engine)
    for (kind, count), seconds in found.items():
        alone, in_a_row = (statistics.median(its) * 1000 for its in zip(*seconds, strict=True))
        plain, least = statistics.median(one for one, _ in found[kind, 1]) * 1000, limit.milliseconds(batch * cached)
        findings.add_row("steps", {
            "cached": cached, "sequences": batch, "rows": batch * count, "drafted": count - 1, "products": kind,
            "recorded": recorded[kind],
            "passes": -(-batch * count // engine.max_num_batched_tokens), "ms": round(alone, 3),
            "queued_ms": round(in_a_row, 3), "limit_ms": round(least, 3), "of_limit": round(least / alone, 3),
            "over_plain": round(alone / plain, 3),
        })  # fmt: skip


def warm_up(use: Callable[[], None], steps: Sequence[Step]) -> None:
    """Compiles and records steps of one kind of products."""
    use()
    for step in steps:
        for _ in range(WARM_UPS):
            finished(step)


def queued(step: Step) -> float:
    """Seconds of a step among some that are launched without waiting for each."""

    def row() -> None:
        for _ in range(QUEUED - 1):
            step()
        finished(step)

    return seconds_of(row) / QUEUED
