"""Times steps of the target by rows, beside their limit."""

import statistics
from functools import partial
from itertools import product

from benchmarks.engine import engine_step, finished
from benchmarks.gpu.engines import SHAPE_SECONDS, WARM_UPS, Limit, is_captured, start
from benchmarks.gpu.part import Findings, Settings
from benchmarks.report import seconds_of
from specpool.engine.run.engine import Engine


def measure_steps(settings: Settings, findings: Findings) -> None:
    """Measure plain steps, and verifications of drafts."""
    engine = start(settings, findings, settings.target, exact=True)
    limit = Limit(engine, settings)
    findings.add(bandwidth_gb_s=round(limit.bandwidth / 1e9, 1), gemm_tflops=round(limit.operations / 1e12, 2))
    for cached, batch in product(settings.sizes.lengths, settings.sizes.batches):
        rows = partial(add_steps, findings, engine, settings, cached, batch, limit)
        findings.attempt(settings, f"{batch} sequences, {cached} cached", SHAPE_SECONDS, rows)


def add_steps(findings: Findings, engine: Engine, settings: Settings, cached: int, batch: int, limit: Limit) -> None:
    """Add a row for a plain step, and one for a verification."""
    steps = {tokens: engine_step(engine, batch, cached, tokens) for tokens in (1, 1 + settings.sizes.num_draft_tokens)}
    times: dict[int, list[float]] = {tokens: [] for tokens in steps}
    for repeat in range(WARM_UPS + settings.sizes.repeats):
        for tokens, step in steps.items():
            seconds = seconds_of(partial(finished, step))
            if repeat >= WARM_UPS:
                times[tokens].append(seconds * 1000)
    plain_ms = statistics.median(times[1])
    for tokens, milliseconds in times.items():
        ms, limit_ms = statistics.median(milliseconds), limit.milliseconds(batch * cached, batch * tokens)
        findings.add_row("steps", {
            "cached": cached, "sequences": batch, "rows": batch * tokens, "drafted": tokens - 1,
            "captured": is_captured(engine), "passes": -(-batch * tokens // engine.max_num_batched_tokens),
            "ms": round(ms, 3), "limit_ms": round(limit_ms, 3), "of_limit": round(limit_ms / ms, 3),
            "over_plain": round(ms / plain_ms, 3),
        })  # fmt: skip
