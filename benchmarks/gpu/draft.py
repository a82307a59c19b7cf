"""Drafts of several tokens by the draft model: by the device alone, and step by step."""

import statistics
from collections.abc import Callable
from functools import partial

from benchmarks.engine import finished
from benchmarks.gpu.device import bandwidth
from benchmarks.gpu.part import Findings, Settings
from benchmarks.gpu.target import LONGEST, WARM_UPS, Limit, started
from benchmarks.report import seconds_of
from specpool.engine.cache.spans import Span
from specpool.engine.run.engine import Engine


def measure(settings: Settings, findings: Findings) -> None:
    """The part of `benchmarks.gpu`."""
    engine = started(settings, findings, settings.draft, exact=False)
    limit, drafted = Limit(engine, bandwidth(settings)), settings.sizes.drafted
    for cached in settings.sizes.lengths:
        for batch in settings.sizes.batches:
            row = partial(
                add_row, findings, engine, settings, cached, batch, drafted * limit.milliseconds(batch * cached)
            )
            findings.attempt(settings, f"{batch} sequences, {cached} cached", LONGEST, row)


def add_row(findings: Findings, engine: Engine, settings: Settings, cached: int, batch: int, least: float) -> None:
    """Adds the milliseconds of the drafts of all sequences. `least`: those of reading weights and cache."""
    drafted = settings.sizes.drafted
    ways: dict[str, Callable[[], object]] = {"steps_ms": lambda: by_steps(engine, cached, batch, drafted)}
    if engine.drafts_ahead:
        spans = [Span(slot, cached, [5], 1) for slot in range(batch)]
        ways["ms"] = lambda: engine.draft(spans, [drafted] * batch)
    found: dict[str, list[float]] = {name: [] for name in ways}
    for repeat in range(WARM_UPS + settings.sizes.repeats):
        for name, way in ways.items():
            seconds = seconds_of(partial(finished, way))
            if repeat >= WARM_UPS:
                found[name].append(seconds)
    ms = {name: round(statistics.median(seconds) * 1000, 3) for name, seconds in found.items()}
    findings.add_row("drafts", {
        "cached": cached, "sequences": batch, "drafted": drafted, "ms": ms.get("ms"), "steps_ms": ms["steps_ms"],
        "limit_ms": round(least, 3), "of_limit": round(least / ms["ms"], 3) if "ms" in ms else None,
    })  # fmt: skip


def by_steps(engine: Engine, cached: int, batch: int, drafted: int) -> list[list[int]]:
    """The drafts of all sequences, with a pass for each token, whose choices are read before the next."""
    drafts = [[5] for _ in range(batch)]
    for step in range(drafted):
        spans = [Span(slot, cached + step, [its[-1]], 1) for slot, its in enumerate(drafts)]
        for its, row in zip(drafts, engine.forward(spans).argmax(-1).tolist(), strict=True):
            its.append(row)
    return [its[1:] for its in drafts]
