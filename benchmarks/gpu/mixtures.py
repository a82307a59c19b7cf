"""Compares the bits of passes with experts, windows and sinks, and times their steps."""

from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

from benchmarks.gpu.engines import SHAPE_SECONDS, Limit, free_models, start
from benchmarks.gpu.exactness import SECONDS, check_all_equal, compare_passes, compare_prefills
from benchmarks.gpu.part import TINY, Findings, Settings
from benchmarks.gpu.steps import add_steps
from specpool.engine.run.engine import Engine

MODELS = ("qwen3-30b-a3b", "gpt-oss-20b")
CHANGES = {"num_hidden_layers": 4}
TINY_CHANGES = {**TINY, "hidden_size": 64, "intermediate_size": 32, "moe_intermediate_size": 32}
# Cached positions: before a window is full, and after several splits of attention. Rehearsals also fill a window.
POSITIONS, REHEARSED_POSITIONS = (40, 1100), (10, 150)


def measure_mixtures(settings: Settings, findings: Findings) -> None:
    """Compare and time random models of a few layers."""
    for shape in MODELS:
        measure_model(replace(settings, target=shape), findings, TINY_CHANGES if settings.rehearse else CHANGES)
        free_models()
    check_all_equal(findings)


def measure_model(settings: Settings, findings: Findings, changes: dict[str, Any]) -> Engine:
    """Compare the bits of the target's passes and prefills, and time its steps. Return its engine.

    `changes`: to the target's configuration.
    """
    shape, sizes = settings.target, settings.sizes
    positions = REHEARSED_POSITIONS if settings.rehearse else POSITIONS
    max_length = max(*positions, *sizes.lengths) + 16
    engine = start(settings, findings, shape, exact=True, max_length=max_length, **changes)
    findings.add_row("self_tests", {"model": shape, "bitwise": engine.bitwise})
    for cached in positions:
        compare = partial(compare_passes, findings, engine, settings, shape, cached)
        findings.attempt(settings, f"{shape}, passes after {cached} positions", SECONDS, compare)
    limit = Limit(engine, settings)
    for cached, batch in product(sizes.lengths[:1], sizes.batches):
        rows = partial(add_steps, findings, engine, settings, cached, batch, limit)
        findings.attempt(settings, f"{shape}, {batch} sequences, {cached} cached", SHAPE_SECONDS, rows)
    for length in positions:  # last, because prefills overwrite the random caches
        compare = partial(compare_prefills, findings, engine, shape, length)
        findings.attempt(settings, f"{shape}, prefill of {length} tokens", SECONDS, compare)
    return engine
