"""Where the time of a target's step goes: kernels by name, how many there are in a layer, and the gaps between them."""

import statistics
from contextlib import nullcontext
from functools import partial
from typing import Any

from torch.profiler import ProfilerActivity, profile

from benchmarks.engine import Step, engine_step, finished
from benchmarks.gpu.part import Findings, Row, Settings
from benchmarks.gpu.target import LONGEST, WARM_UPS, is_recorded, started
from specpool.engine.run.engine import Engine

NAMED = 25


def measure(settings: Settings, findings: Findings) -> None:
    """The part of `benchmarks.gpu`."""
    engine, sizes = started(settings, findings, settings.target, exact=True), settings.sizes
    cached, several = sizes.lengths[0], sizes.batches[1]
    for batch, tokens in ((1, 1), (several, 1), (several, 1 + sizes.drafted)):
        step = engine_step(engine, batch, cached, tokens)
        for how in ("recorded", "launched") if is_recorded(engine) else ("launched",):
            its = {"cached": cached, "sequences": batch, "rows": batch * tokens, "how": how}
            rows = partial(add_rows, findings, engine, step, its)
            findings.attempt(settings, f"{batch * tokens} rows, {how}", LONGEST, rows)


def add_rows(findings: Findings, engine: Engine, step: Step, its: Row) -> None:
    """Adds the rows of a step, of which `its` is told."""
    with engine.forward_pass.launched() if its["how"] == "launched" else nullcontext():
        row, names = profiled(engine, step)
    findings.add_row("steps", {**its, **row})
    for name in names:
        findings.add_row("names", {**its, **name})


def profiled(engine: Engine, step: Step) -> tuple[Row, list[Row]]:
    """The times of a step on its device, and those of its kernels by name, longest first."""
    for _ in range(WARM_UPS):
        finished(step)
    activities, wanted = [ProfilerActivity.CPU], engine.facts.device.type.upper()
    if wanted == "CUDA":
        activities.append(ProfilerActivity.CUDA)
    for _ in range(2):  # the first profile starts the profiler's library
        with profile(activities=activities) as profiler:
            finished(step)
    events: list[Any] = [its for its in profiler.events() or [] if its.device_type.name == wanted]
    events = [its for its in events if not getattr(its, "is_user_annotation", False)]
    layers = engine.loaded.config.num_hidden_layers
    return times_of([(its.name, its.time_range.start, its.time_range.end) for its in events], layers)


def times_of(events: list[tuple[str, float, float]], layers: int) -> tuple[Row, list[Row]]:
    """What events say, each a name with its begin and end in microseconds."""
    if not events:
        raise RuntimeError("the profiler saw nothing run on the device")
    events = sorted(events, key=lambda event: event[1])
    until, gaps = events[0][1], []
    for _, begin, end in events:
        gaps.append(max(0.0, begin - until))
        until = max(until, end)
    span, idle = until - events[0][1], sum(gaps)
    spent: dict[str, list[float]] = {}
    for name, begin, end in events:
        spent.setdefault(name, []).append(end - begin)
    row = {
        "kernels": len(events), "kernels_a_layer": round(len(events) / layers, 2), "device_us": round(span, 1),
        "idle_us": round(idle, 1), "idle_share": round(idle / span, 3) if span else None,
        "longest_gap_us": round(max(gaps), 1),
    }  # fmt: skip
    whole = sum(map(sum, spent.values()))
    longest = sorted(spent.items(), key=lambda its: -sum(its[1]))
    names = [
        {"name": name, "times": len(us), "us": round(sum(us), 1), "us_each": round(statistics.median(us), 2),
         "share": round(sum(us) / whole, 3) if whole else None}
        for name, us in longest[:NAMED]
    ]  # fmt: skip
    return row, names
