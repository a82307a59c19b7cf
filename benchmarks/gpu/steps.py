"""Times steps of the target by rows, beside their limit."""

import statistics
from collections.abc import Callable, Sequence
from functools import partial
from itertools import product

import torch

from benchmarks.engine import Step, engine_step, finished
from benchmarks.gpu.engines import SHAPE_SECONDS, WARM_UPS, Limit, gpu_model, is_captured, start
from benchmarks.gpu.part import Findings, Settings
from benchmarks.report import seconds_of
from specpool.engine.passes.forward_pass import ForwardPass
from specpool.engine.passes.gpu.captured import CapturedModel
from specpool.engine.passes.gpu.gemm import GEMM_BACKENDS, cublas_rows_of
from specpool.engine.run.engine import Engine

CHOSEN = "chosen"


def measure_steps(settings: Settings, findings: Findings) -> None:
    """Measure steps and verifications with each GEMM backend."""
    engine = start(settings, findings, settings.target, exact=True)
    limit = Limit(engine, settings)
    findings.add(bandwidth_gb_s=round(limit.bandwidth / 1e9, 1), gemm_tflops=round(limit.operations / 1e12, 2))
    switches = backend_switches(engine, settings)
    for cached, batch in product(settings.sizes.lengths, settings.sizes.batches):
        rows = partial(add_steps, findings, engine, settings, switches, cached, batch, limit)
        findings.attempt(settings, f"{batch} sequences, {cached} cached", SHAPE_SECONDS, rows)


def backend_switches(engine: Engine, settings: Settings) -> dict[str, Callable[[], None]]:
    """Functions that switch all GEMMs to one backend, or to the chosen ones. Each has separate graphs."""
    model, chosen = gpu_model(engine), engine.forward_pass
    if model is None:
        return {CHOSEN: lambda: None}
    gemms = model.gemms()

    def use(cublas_rows: Sequence[int | None], forward_pass: ForwardPass) -> None:
        for gemm, rows in zip(gemms, cublas_rows, strict=True):
            gemm.cublas_rows = rows
        engine.forward_pass = engine.runner.forward_pass = forward_pass

    before = [gemm.cublas_rows for gemm in gemms]
    switches: dict[str, Callable[[], None]] = {CHOSEN: partial(use, before, chosen)}
    rows = product(settings.sizes.batches, (1, 1 + settings.sizes.num_draft_tokens))
    sizes = {model.padded_rows(batch * tokens) for batch, tokens in rows}
    for backend in GEMM_BACKENDS:
        forward_pass = CapturedModel(model, chosen.capture) if isinstance(chosen, CapturedModel) else model
        switches[backend] = partial(use, [cublas_rows_of(backend)] * len(gemms), forward_pass)
        switches[backend]()
        captured = [size for size in sizes if size <= forward_pass.captured_rows]
        with torch.inference_mode():
            forward_pass.capture_graphs(engine.layout.arena, captured, engine.max_model_len, 0)
    switches[CHOSEN]()
    return switches


def add_steps(
    findings: Findings, engine: Engine, settings: Settings, switches: dict[str, Callable[[], None]], cached: int,
    batch: int, limit: Limit,
) -> None:  # fmt: skip
    """Add a row per backend for a plain step, and for a verification."""
    steps = {tokens: engine_step(engine, batch, cached, tokens) for tokens in (1, 1 + settings.sizes.num_draft_tokens)}
    what = f"{batch} sequences, {cached} cached, GEMM backend"
    working = {
        name: use for name, use in switches.items()
        if findings.attempt(settings, f"{what} {name}", SHAPE_SECONDS, partial(warm_up, use, list(steps.values())))
    }  # fmt: skip
    times: dict[tuple[str, int], list[float]] = {each: [] for each in product(working, steps)}
    for _ in range(settings.sizes.repeats):
        for name, use in working.items():
            use()
            for tokens, step in steps.items():
                times[name, tokens].append(seconds_of(partial(finished, step)) * 1000)
    captured = {}
    for name, use in working.items():
        use()
        captured[name] = is_captured(engine)
    switches[CHOSEN]()
    for (name, tokens), milliseconds in times.items():
        ms, plain_ms = statistics.median(milliseconds), statistics.median(times[name, 1])
        limit_ms = limit.milliseconds(batch * cached, batch * tokens)
        findings.add_row("steps", {
            "cached": cached, "sequences": batch, "rows": batch * tokens, "drafted": tokens - 1, "backend": name,
            "captured": captured[name], "passes": -(-batch * tokens // engine.max_num_batched_tokens),
            "ms": round(ms, 3), "limit_ms": round(limit_ms, 3), "of_limit": round(limit_ms / ms, 3),
            "over_plain": round(ms / plain_ms, 3),
        })  # fmt: skip


def warm_up(use: Callable[[], None], steps: Sequence[Step]) -> None:
    """Compile the kernels of steps with one backend."""
    use()
    for step in steps:
        for _ in range(WARM_UPS):
            finished(step)
