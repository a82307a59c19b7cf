"""Compares the bits of passes with recurrent layers, also after rejections, and times steps, prefills and drafts."""

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from benchmarks.engine import finished
from benchmarks.gpu.engines import SHAPE_SECONDS, Limit, free_models, start
from benchmarks.gpu.exactness import SECONDS, Rows, add_row, check_all_equal, hows, logits_of, run_repeatedly
from benchmarks.gpu.mixtures import measure_model
from benchmarks.gpu.part import TINY, Findings, Settings
from benchmarks.gpu.steps import Tokens, add_drafts, draft_by_loop, draft_by_steps
from benchmarks.report import seconds_of
from specpool.engine.cache.spans import Span
from specpool.engine.run.engine import Engine

_TINY = {**TINY, "hidden_size": 64, "intermediate_size": 96}
MODELS: dict[str, dict[str, Any]] = {
    "qwen3.5-9b": {
        **_TINY, "layer_types": ["linear_attention", "full_attention"], "linear_num_key_heads": 1,
        "linear_num_value_heads": 2, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
    },
    "lfm2-1.2b": {**_TINY, "layer_types": ["conv", "full_attention"]},
}  # fmt: skip
"""Changes of each model in rehearsals."""
DRAFT = "qwen3.5-0.8b"
PROMPTS, REHEARSED_PROMPTS = (40, 300), (6,)
"""Tokens before the first verification: fewer than a page, and several pages."""
DRAFTS, ROUNDS, REHEARSED_ROUNDS = 4, 12, 3
TIMED_PREFILL = 2048


def measure_hybrids(settings: Settings, findings: Findings) -> None:
    """Compare and time random models of real size, and drafts of one of them."""
    for shape, changes in MODELS.items():
        measure_hybrid(replace(settings, target=shape), findings, changes if settings.rehearse else {})
        free_models()
    measure_drafts(replace(settings, draft=DRAFT), findings, MODELS["qwen3.5-9b"] if settings.rehearse else {})
    check_all_equal(findings)


def measure_hybrid(settings: Settings, findings: Findings, changes: dict[str, Any]) -> None:
    """Compare and time the target. `changes`: to its configuration."""
    engine, shape = measure_model(settings, findings, changes), settings.target
    for length in REHEARSED_PROMPTS if settings.rehearse else PROMPTS:
        compare = partial(compare_rejections, findings, engine, settings, length)
        findings.attempt(settings, f"{shape}, rejections after {length} tokens", SECONDS, compare)
    findings.attempt(settings, f"{shape}, prefill", SECONDS, partial(time_prefill, findings, engine, shape))


def measure_drafts(settings: Settings, findings: Findings, changes: dict[str, Any]) -> None:
    """Compare and time the draft loop and single steps. `changes`: to the draft model's configuration."""
    sizes, (length, *_) = settings.sizes, REHEARSED_PROMPTS if settings.rehearse else PROMPTS
    engine = start(settings, findings, DRAFT, exact=False, **changes)
    compare = partial(compare_drafts, findings, engine, settings, length)
    findings.attempt(settings, f"{DRAFT}, drafts after {length} tokens", SECONDS, compare)
    limit = Limit(engine, settings)
    for batch in sizes.batches:
        rows = partial(add_drafts, findings, engine, settings, sizes.lengths[0], batch, limit)
        findings.attempt(settings, f"{DRAFT}, drafts of {batch} sequences", SHAPE_SECONDS, rows)


def compare_drafts(findings: Findings, engine: Engine, settings: Settings, length: int) -> None:
    """Compare the draft loop with single steps, launched, in rounds that reject some of the drafts."""
    with engine.forward_pass.eager():
        expected = draft_rounds(engine, settings, length, draft_by_steps)
    for what, way in {"single steps": draft_by_steps, "draft loop": draft_by_loop}.items():
        drafts = draft_rounds(engine, settings, length, way)
        different = sum(one != other for one, other in zip(drafts, expected, strict=True))
        findings.add_row("exactness", {
            "model": DRAFT, "what": what, "sequences": max(settings.sizes.batches), "positions": length,
            "how": hows(engine)[-1], "rows": len(drafts), "different": different, "equal": not different,
        })  # fmt: skip


def draft_rounds(
    engine: Engine, settings: Settings, length: int, way: Callable[[Engine, Sequence[Span], int], Tokens | None]
) -> Tokens:
    """Return the drafts of all sequences in several rounds. Each keeps a part of a draft, and adds a token."""
    rng, count, made = random.Random(length), max(settings.sizes.batches), list[list[int]]()
    texts, cached = [[rng.randrange(engine.vocab_size) for _ in range(length)] for _ in range(count)], [0] * count
    for _ in range(REHEARSED_ROUNDS if settings.rehearse else ROUNDS):
        spans = [
            Span(slot, start, texts[slot][start:], 1, num_tentative=int(len(texts[slot]) > start + 1))
            for slot, start in enumerate(cached)
        ]
        drafts = way(engine, spans, DRAFTS) or []
        for slot, draft in enumerate(drafts):
            kept = rng.randint(0, DRAFTS)
            cached[slot] = len(texts[slot]) + min(kept, DRAFTS - 1)
            texts[slot] += [*draft[:kept], rng.randrange(engine.vocab_size)]
        made += drafts
    return made


def compare_rejections(findings: Findings, engine: Engine, settings: Settings, length: int) -> None:
    """Compare verifications, most of whose drafts are partly wrong, with one token per pass, launched."""
    rng, count = random.Random(length), max(settings.sizes.batches)
    rounds = REHEARSED_ROUNDS if settings.rehearse else ROUNDS
    texts = [[rng.randrange(engine.vocab_size) for _ in range(length + rounds * (1 + DRAFTS))] for _ in range(count)]
    reference: Rows = {}
    with engine.forward_pass.eager():
        for slot in {0, count - 1}:
            logits_of(engine, [Span(slot, 0, texts[slot][:length], 1)])
            for at in range(length, len(texts[slot])):
                reference |= logits_of(engine, [Span(slot, at, texts[slot][at : at + 1], 1)])
    for how in hows(engine):
        logits_of(engine, [Span(slot, 0, text[:length], 1) for slot, text in enumerate(texts)])
        ends, runs = [length] * count, list[Rows]()
        for _ in range(rounds):
            accepted = [rng.randint(0, DRAFTS) for _ in texts]
            spans = [verification(slot, texts[slot], ends[slot], accepted[slot]) for slot in range(count)]
            ends = [end + 1 + kept for end, kept in zip(ends, accepted, strict=True)]
            for rows in run_repeatedly(engine, partial(list, [spans]), how):
                places = [(slot, at) for slot, at in reference if at < ends[slot] and (slot, at) in rows]
                runs.append({place: rows[place].clone() for place in places})  # a row would keep those of all slots
        facts = {"model": settings.target, "what": "rejections", "sequences": count, "positions": length, "how": how}
        add_row(findings, facts, reference, runs)


def verification(slot: int, text: list[int], start: int, accepted: int) -> Span:
    """A token and drafts, of which `accepted` continue the text."""
    tokens = text[start : start + 1 + DRAFTS]
    wrong = [token ^ 1 for token in tokens[1 + accepted :]]
    return Span(slot, start, tokens[: 1 + accepted] + wrong, len(tokens), num_tentative=len(tokens) - 1)


def time_prefill(findings: Findings, engine: Engine, shape: str) -> None:
    """Time a prompt in one pass. Its rows run one after the other in recurrent layers."""
    length = min(TIMED_PREFILL, engine.max_model_len - 1)
    run = partial(finished, partial(engine.forward, [Span(0, 0, [5] * length, 1)]))
    row: dict[str, Any] = {"model": shape, "tokens": length, "ms": [round(seconds_of(run) * 1000, 1) for _ in range(3)]}
    findings.add_row("prefills", row)
