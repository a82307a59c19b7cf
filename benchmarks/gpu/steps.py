"""Measures device rates, target steps and drafts against the time to read weights and cache, and profiles steps."""

import platform
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import torch
import transformers
from torch.profiler import ProfilerActivity, profile

from benchmarks.engine import Step, engine_step, finished, weight_bytes_read
from benchmarks.gpu.part import Findings, Row, Settings
from benchmarks.report import seconds_of
from benchmarks.shapes import random_loaded
from specpool.engine.cache.spans import Span
from specpool.engine.config.options import EngineOptions
from specpool.engine.numerics.triton_compat import triton
from specpool.engine.passes.drafts import Draft, DraftRound
from specpool.engine.passes.gpu.captured import CapturedModel
from specpool.engine.passes.gpu.gemm import GEMM_BACKENDS, GemmBackend
from specpool.engine.passes.gpu.model import GpuModel
from specpool.engine.run.engine import Engine
from specpool.engine.startup.loading import start_engine

CHOSEN = "chosen"
Tokens = list[list[int]]
"""Draft tokens of each sequence."""
# A shape runs eagerly the first time and is captured the second time.
WARM_UPS = 4
# Minimum seconds left to start a shape.
SHAPE_SECONDS = 5
# Kernels of a profile to name.
NAMED = 25


# --- Rates


def measure_device(settings: Settings, findings: Findings) -> None:
    """Measure what the device can do. This process does not restrict cuBLAS."""
    findings.add(**description(torch.device(settings.device)))
    findings.add(**{name: round(rate / 1e9, 1) for name, rate in bandwidths(settings)})
    size = settings.sizes.gemm
    a, b = settings.randn(2, size, size)
    flops = 2 * size**3 / seconds_each(settings, lambda: a @ b)
    findings.add(gemm_tflops=round(flops / 1e12, 2))


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
    """Bytes per second when reading memory, and when copying it (read plus written)."""
    size = settings.sizes.moved_bytes
    source = torch.ones(size // 4, device=settings.device)
    yield "read_gb_s", size / seconds_each(settings, source.sum)
    target = torch.empty_like(source)
    yield "copy_gb_s", 2 * size / seconds_each(settings, lambda: target.copy_(source))


def seconds_each(settings: Settings, work: Callable[[], object]) -> float:
    """Median seconds of work that runs several times in a row."""

    def row() -> None:
        for _ in range(settings.sizes.in_a_row - 1):
            work()
        finished(work)

    row()
    return statistics.median(seconds_of(row) for _ in range(settings.sizes.repeats)) / settings.sizes.in_a_row


# --- Engines


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
    gemms = {} if model is None else {f"{g.out_features} x {g.in_features}": g.backend for g in model.gemms()}
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
    return isinstance(engine.forward_pass, CapturedModel) and engine.forward_pass.capture is not None


class Limit:
    """The time to read weights and cache once."""

    def __init__(self, engine: Engine, settings: Settings) -> None:
        self.bandwidth = max(rate for _, rate in bandwidths(settings))  # bytes per second
        self._weights, self._position = weight_bytes_read(engine), engine.info().kv_bytes_per_token

    def milliseconds(self, positions: int) -> float:
        """The limit of a pass over this many cached positions."""
        return (self._weights + positions * self._position) / self.bandwidth * 1000


# --- Steps of the target


def measure_target(settings: Settings, findings: Findings) -> None:
    """Measure steps and verifications with each GEMM backend."""
    engine = start(settings, findings, settings.target, exact=True)
    limit = Limit(engine, settings)
    findings.add(bandwidth_gb_s=round(limit.bandwidth / 1e9, 1))
    switches = backend_switches(engine)
    for cached, batch in product(settings.sizes.lengths, settings.sizes.batches):
        rows = partial(add_steps, findings, engine, settings, switches, cached, batch, limit)
        findings.attempt(settings, f"{batch} sequences, {cached} cached", SHAPE_SECONDS, rows)


def backend_switches(engine: Engine) -> dict[str, Callable[[], None]]:
    """Functions that switch all GEMMs to one backend, or to the chosen ones. Each has separate graphs."""
    model = gpu_model(engine)
    if model is None:
        return {CHOSEN: lambda: None}
    capture = engine.forward_pass.capture if isinstance(engine.forward_pass, CapturedModel) else None
    gemms = model.gemms()

    def use(backends: Sequence[GemmBackend], forward_pass: CapturedModel | GpuModel) -> None:
        for gemm, backend in zip(gemms, backends, strict=True):
            gemm.backend = backend
        engine.forward_pass = forward_pass

    choices: dict[str, list[GemmBackend]] = {CHOSEN: [gemm.backend for gemm in gemms]}
    choices |= {backend: [backend] * len(gemms) for backend in GEMM_BACKENDS}
    return {
        name: partial(use, backends, model if capture is None else CapturedModel(model, capture))
        for name, backends in choices.items()
    }


def add_steps(
    findings: Findings, engine: Engine, settings: Settings, switches: dict[str, Callable[[], None]], cached: int,
    batch: int, limit: Limit,
) -> None:  # fmt: skip
    """Add a row per backend for a plain step, and for a verification."""
    steps = {tokens: engine_step(engine, batch, cached, tokens) for tokens in (1, 1 + settings.sizes.num_draft_tokens)}
    what = f"{batch} sequences, {cached} cached, GEMM backend"
    switches = {
        name: use for name, use in switches.items()
        if findings.attempt(settings, f"{what} {name}", SHAPE_SECONDS, partial(warm_up, use, list(steps.values())))
    }  # fmt: skip
    times: dict[tuple[str, int], list[float]] = {each: [] for each in product(switches, steps)}
    for _ in range(settings.sizes.repeats):
        for name, use in switches.items():
            use()
            for tokens, step in steps.items():
                times[name, tokens].append(seconds_of(partial(finished, step)) * 1000)
    captured = {}
    for name, use in reversed(switches.items()):  # ends with the chosen backends
        use()
        captured[name] = is_captured(engine)
    limit_ms = limit.milliseconds(batch * cached)
    for (name, tokens), milliseconds in times.items():
        ms, plain_ms = statistics.median(milliseconds), statistics.median(times[name, 1])
        findings.add_row("steps", {
            "cached": cached, "sequences": batch, "rows": batch * tokens, "drafted": tokens - 1, "backend": name,
            "captured": captured[name], "passes": -(-batch * tokens // engine.max_num_batched_tokens),
            "ms": round(ms, 3), "limit_ms": round(limit_ms, 3), "of_limit": round(limit_ms / ms, 3),
            "over_plain": round(ms / plain_ms, 3),
        })  # fmt: skip


def warm_up(use: Callable[[], None], steps: Sequence[Step]) -> None:
    """Compile and capture steps with one backend."""
    use()
    for step in steps:
        for _ in range(WARM_UPS):
            finished(step)


# --- Drafts


def measure_drafts(settings: Settings, findings: Findings) -> None:
    """Measure drafts of the draft model: by the draft loop on the device, and step by step."""
    engine = start(settings, findings, settings.draft, exact=False)
    limit = Limit(engine, settings)
    for cached, batch in product(settings.sizes.lengths, settings.sizes.batches):
        rows = partial(add_drafts, findings, engine, settings, cached, batch, limit)
        findings.attempt(settings, f"{batch} sequences, {cached} cached", SHAPE_SECONDS, rows)


def add_drafts(findings: Findings, engine: Engine, settings: Settings, cached: int, batch: int, limit: Limit) -> None:
    """Add a row: milliseconds of the drafts of all sequences."""
    count = settings.sizes.num_draft_tokens
    limit_ms = count * limit.milliseconds(batch * cached)
    ways: dict[str, Callable[[], Tokens | None]] = {
        name: partial(way, engine, cached, batch, count)
        for name, way in (("steps_ms", draft_by_steps), ("ms", draft_by_loop))
    }
    if ways["ms"]() is None:
        del ways["ms"]
    times: dict[str, list[float]] = {name: [] for name in ways}
    for repeat in range(WARM_UPS + settings.sizes.repeats):
        for name, way in ways.items():
            seconds = seconds_of(partial(finished, way))
            if repeat >= WARM_UPS:
                times[name].append(seconds)
    ms = {name: round(statistics.median(seconds) * 1000, 3) for name, seconds in times.items()}
    findings.add_row("drafts", {
        "cached": cached, "sequences": batch, "drafted": count, "ms": ms.get("ms"), "steps_ms": ms["steps_ms"],
        "limit_ms": round(limit_ms, 3), "of_limit": round(limit_ms / ms["ms"], 3) if "ms" in ms else None,
        "same_tokens": ways["ms"]() == ways["steps_ms"]() if "ms" in ms else None,
    })  # fmt: skip


def draft_by_loop(engine: Engine, cached: int, batch: int, num_draft_tokens: int) -> Tokens | None:
    """Draft with the loop on the device; None if the engine has none."""
    drafts = [Draft(Span(slot, cached, [5], 1), None, [5] * (cached + 1), num_draft_tokens) for slot in range(batch)]
    if not engine.can_draft(drafts):
        return None
    engine.draft([DraftRound(drafts)])
    return [draft.token_ids for draft in drafts]


def draft_by_steps(engine: Engine, cached: int, batch: int, num_draft_tokens: int) -> Tokens:
    """Draft with one pass per token. The host reads each token before the next pass."""
    drafts = [[5] for _ in range(batch)]
    for step in range(num_draft_tokens):
        spans = [Span(slot, cached + step, [draft[-1]], 1) for slot, draft in enumerate(drafts)]
        for draft, row in zip(drafts, engine.forward(spans).argmax(-1).tolist(), strict=True):
            draft.append(row)
    return [draft[1:] for draft in drafts]


# --- Profiles


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
