"""Profiles steps of the target and a draft: kernels by name, and the gaps between them.

In a replayed graph, a kernel may start early and wait for the previous one (programmatic dependent launch), so its
duration includes that wait. Only eager profiles tell how long each kernel takes, only captured ones the whole step.
"""

import statistics
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

from torch.profiler import ProfilerActivity, profile

from benchmarks.engine import engine_step, finished
from benchmarks.gpu.drafts import draft_by_loop
from benchmarks.gpu.engines import SHAPE_SECONDS, WARM_UPS, is_captured, start
from benchmarks.gpu.part import Findings, Row, Settings
from specpool.engine.run.engine import Engine

# Kernels to name.
NAMED = 25


def measure_profile(settings: Settings, findings: Findings) -> None:
    """Profile steps and verifications of the target, then a draft of several sequences."""
    sizes, cached = settings.sizes, settings.sizes.lengths[0]
    several, many, drafted = sizes.batches[1], sizes.batches[-1], sizes.num_draft_tokens
    engine = start(settings, findings, settings.target, exact=True)
    for batch, tokens in ((1, 1), (several, 1), (several, 1 + drafted), (many, 1 + drafted)):
        step = engine_step(engine, batch, cached, tokens)
        attempt_profiles(settings, findings, engine, step, {"work": f"{batch} x {tokens} rows", "passes": 1})
    engine = start(settings, findings, settings.draft, exact=False)
    draft = partial(draft_by_loop, engine, cached, several, drafted)
    facts = {"work": f"{drafted} draft tokens for {several}", "passes": drafted}
    attempt_profiles(settings, findings, engine, draft, facts)


def attempt_profiles(
    settings: Settings, findings: Findings, engine: Engine, work: Callable[[], object], facts: Row
) -> None:
    """Profile work as the engine runs it, and eagerly."""
    for how in ("captured", "eager") if is_captured(engine) else ("eager",):
        add = partial(add_profile, findings, engine, work, {**facts, "how": how})
        findings.attempt(settings, f"{facts['work']}, {how}", SHAPE_SECONDS, add)


def add_profile(findings: Findings, engine: Engine, work: Callable[[], object], facts: Row) -> None:
    """Add a row for the work, and one for each of its kernels."""
    with engine.forward_pass.eager() if facts["how"] == "eager" else nullcontext():
        for _ in range(WARM_UPS):
            finished(work)
        device, activities = engine.facts.device.type.upper(), [ProfilerActivity.CPU]
        if device == "CUDA":
            activities.append(ProfilerActivity.CUDA)
        for _ in range(2):  # the first profile starts the profiler's library
            with profile(activities=activities) as profiler:
                finished(work)
    events: list[Any] = [event for event in profiler.events() or [] if event.device_type.name == device]
    events = [event for event in events if not getattr(event, "is_user_annotation", False)]
    times = [(event.name, event.time_range.start, event.time_range.end) for event in events]
    row, names = summarize(times, facts["passes"] * engine.loaded.config.num_hidden_layers)
    findings.add_row("steps", {**facts, **row})
    for name in names:
        findings.add_row("names", {**facts, **name})


def summarize(events: list[tuple[str, float, float]], layers: int) -> tuple[Row, list[Row]]:
    """A row for the work, and one per kernel name, longest first. Events: name, begin, end in microseconds.

    `layers`: layers of all passes.
    """
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
