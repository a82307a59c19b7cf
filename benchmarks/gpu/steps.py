"""Times steps of the target by rows, beside their limit, and drafts of the draft model."""

import statistics
from collections.abc import Callable, Sequence
from functools import partial
from itertools import product

from benchmarks.engine import engine_step, finished
from benchmarks.gpu.engines import SHAPE_SECONDS, WARM_UPS, Limit, is_captured, start
from benchmarks.gpu.part import Findings, Settings
from benchmarks.report import seconds_of
from specpool.engine.cache.spans import Span
from specpool.engine.passes.drafts import Draft, DraftRound
from specpool.engine.run.engine import Engine

Tokens = list[list[int]]
"""Draft tokens of each sequence."""


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
            "model": settings.target, "cached": cached, "sequences": batch, "rows": batch * tokens,
            "drafted": tokens - 1,
            "captured": is_captured(engine), "passes": -(-batch * tokens // engine.max_num_batched_tokens),
            "ms": round(ms, 3), "limit_ms": round(limit_ms, 3), "of_limit": round(limit_ms / ms, 3),
            "over_plain": round(ms / plain_ms, 3),
        })  # fmt: skip


def measure_drafts(settings: Settings, findings: Findings) -> None:
    """Measure drafts of the draft model: by the draft loop on the device, and step by step."""
    engine = start(settings, findings, settings.draft, exact=False)
    limit = Limit(engine, settings)
    for cached, batch in product(settings.sizes.lengths, settings.sizes.batches):
        rows = partial(add_drafts, findings, engine, settings, cached, batch, limit)
        findings.attempt(settings, f"{batch} sequences, {cached} cached", SHAPE_SECONDS, rows)


def add_drafts(findings: Findings, engine: Engine, settings: Settings, cached: int, batch: int, limit: Limit) -> None:
    """Add a row: milliseconds of the drafts of all sequences, and whether both ways draft the same tokens."""
    count = settings.sizes.num_draft_tokens
    limit_ms = count * limit.milliseconds(batch * cached, batch)
    spans = spans_after(cached, batch)
    ways: dict[str, Callable[[], Tokens | None]] = {
        name: partial(way, engine, spans, count) for name, way in (("steps_ms", draft_by_steps), ("ms", draft_by_loop))
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
        "model": settings.draft, "cached": cached, "sequences": batch, "drafted": count, "ms": ms.get("ms"),
        "steps_ms": ms["steps_ms"],
        "limit_ms": round(limit_ms, 3), "of_limit": round(limit_ms / ms["ms"], 3) if "ms" in ms else None,
        "same_tokens": ways["ms"]() == ways["steps_ms"]() if "ms" in ms else None,
    })  # fmt: skip


def spans_after(cached: int, batch: int) -> list[Span]:
    """A token of each sequence."""
    return [Span(slot, cached, [5], 1) for slot in range(batch)]


def draft_by_loop(engine: Engine, spans: Sequence[Span], num_draft_tokens: int) -> Tokens | None:
    """Draft after these spans with the loop on the device, which waits once; None if the engine has none."""
    drafts = [Draft(span, None, [5] * span.end, num_draft_tokens) for span in spans]
    if not engine.can_draft(drafts):
        return None
    engine.draft([DraftRound(drafts)])
    return [draft.token_ids for draft in drafts]


def draft_by_steps(engine: Engine, spans: Sequence[Span], num_draft_tokens: int) -> Tokens:
    """Draft after these spans. The host waits for each token."""
    drafts: Tokens = [[] for _ in spans]
    for _ in range(num_draft_tokens):
        for draft, row in zip(drafts, engine.forward(spans).argmax(-1).tolist(), strict=True):
            draft.append(row)
        spans = [
            Span(span.slot, span.end, draft[-1:], 1, num_tentative=1)
            for span, draft in zip(spans, drafts, strict=True)
        ]  # fmt: skip
    return drafts
