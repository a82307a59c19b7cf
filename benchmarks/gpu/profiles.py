"""Profiles steps of the target: kernels by name, and the gaps between them."""

import statistics
from contextlib import nullcontext
from functools import partial
from typing import Any

from torch.profiler import ProfilerActivity, profile

from benchmarks.engine import Step, engine_step, finished
from benchmarks.gpu.engines import SHAPE_SECONDS, WARM_UPS, is_captured, start
from benchmarks.gpu.part import Findings, Row, Settings
from specpool.engine.run.engine import Engine

# Kernels of a step to name.
NAMED = 25


def measure_profile(settings: Settings, findings: Findings) -> None:
    """Profile steps of the target: kernels by name, their number per layer, and the gaps between them."""
    engine, sizes = start(settings, findings, settings.target, exact=True), settings.sizes
    cached, several = sizes.lengths[0], sizes.batches[1]
    for batch, tokens in ((1, 1), (several, 1), (several, 1 + sizes.num_draft_tokens)):
        step = engine_step(engine, batch, cached, tokens)
        for how in ("captured", "eager") if is_captured(engine) else ("eager",):
            facts = {"cached": cached, "sequences": batch, "rows": batch * tokens, "how": how}
            rows = partial(add_profile, findings, engine, step, facts)
            findings.attempt(settings, f"{batch * tokens} rows, {how}", SHAPE_SECONDS, rows)


def add_profile(findings: Findings, engine: Engine, step: Step, facts: Row) -> None:
    """Add the rows of a step."""
    with engine.forward_pass.eager() if facts["how"] == "eager" else nullcontext():
        for _ in range(WARM_UPS):
            finished(step)
        device, activities = engine.facts.device.type.upper(), [ProfilerActivity.CPU]
        if device == "CUDA":
            activities.append(ProfilerActivity.CUDA)
        for _ in range(2):  # the first profile starts the profiler's library
            with profile(activities=activities) as profiler:
                finished(step)
    events: list[Any] = [event for event in profiler.events() or [] if event.device_type.name == device]
    events = [event for event in events if not getattr(event, "is_user_annotation", False)]
    times = [(event.name, event.time_range.start, event.time_range.end) for event in events]
    row, names = summarize(times, engine.loaded.config.num_hidden_layers)
    findings.add_row("steps", {**facts, **row})
    for name in names:
        findings.add_row("names", {**facts, **name})


def summarize(events: list[tuple[str, float, float]], layers: int) -> tuple[Row, list[Row]]:
    """A row for the step, and one per kernel name, longest first. Events: name, begin, end in microseconds."""
    if not events:
        raise RuntimeError("the profiler saw nothing run on the device")
    events = sorted(events, key=lambda event: event[1])
    until, gaps = events[0][1], []
    spent: dict[str, list[float]] = {}
    for name, begin, end in events:
        gaps.append(max(0.0, begin - until))
        until = max(until, end)
        spent.setdefault(name, []).append(end - begin)
    span, idle, busy = until - events[0][1], sum(gaps), sum(map(sum, spent.values()))
    row = {
        "kernels": len(events), "kernels_a_layer": round(len(events) / layers, 2), "device_us": round(span, 1),
        "idle_us": round(idle, 1), "idle_share": round(idle / span, 3) if span else None,
        "longest_gap_us": round(max(gaps), 1),
    }  # fmt: skip
    names = [
        {"name": name, "times": len(us), "us": round(sum(us), 1), "us_each": round(statistics.median(us), 2),
         "share": round(sum(us) / busy, 3) if busy else None}
        for name, us in sorted(spent.items(), key=lambda item: -sum(item[1]))[:NAMED]
    ]  # fmt: skip
    return row, names
