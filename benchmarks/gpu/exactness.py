"""Compares logits by bits: passes of all kinds, launched and replayed, with those of one sequence alone.

The reference is a sequence alone, one token per pass, launched. Caches are random, and every slot has its own. A
prefill instead fills the cache, and is compared in chunks of several sizes.
"""

import random
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from itertools import cycle, product

import torch

from benchmarks.gpu.engines import free_models, is_captured, start
from benchmarks.gpu.head import eagle_layers
from benchmarks.gpu.part import Findings, Row, Settings
from benchmarks.gpu.steps import draft_by_loop, draft_by_steps, spans_after
from specpool.engine.cache.spans import Span
from specpool.engine.run.engine import Engine

# Cached positions, with up to 16 splits of attention. Prefills stop at these numbers of tokens.
POSITIONS, REHEARSED_POSITIONS = (40, 300, 1100, 4000), (10, 70)
TOKENS = 5
"""Tokens per sequence of a verification."""
CHUNKS, LAST = (1, 15, 97, 512, 2048), 8
"""Tokens per pass of a prefill, and last tokens to compare."""
MAX_PASSES = 80
"""Chunks too small for a prompt are left out. Their bits are compared with those of larger ones in shorter prompts."""
MAX_REFERENCES = 8
"""Sequences of a batch to run alone."""
REPEATS = 3
"""A shape is launched the first time, captured the second time, and replayed from then on."""
SECONDS = 4
"""Minimum seconds left to start a comparison."""

Rows = dict[tuple[int, int], torch.Tensor]
"""Logits by slot and position."""


class DifferentBitsError(RuntimeError):
    """Some comparisons found different bits."""


def measure_exactness(settings: Settings, findings: Findings) -> None:
    """Compare passes of the target, and of the draft model, by bits, and the draft loop with single steps."""
    positions = REHEARSED_POSITIONS if settings.rehearse else POSITIONS
    for shape in (settings.target, settings.draft):
        engine = start(settings, findings, shape, exact=True, max_length=max(positions) + 16)
        for cached in positions:
            compare = partial(compare_passes, findings, engine, settings, shape, cached)
            findings.attempt(settings, f"{shape}, passes after {cached} positions", SECONDS, compare)
            if shape == settings.target:
                compare = partial(compare_states, findings, engine, settings, shape, cached)
                findings.attempt(settings, f"{shape}, states after {cached} positions", SECONDS, compare)
        for cached, batch in product(positions if shape == settings.draft else (), settings.sizes.batches):
            compare = partial(compare_drafts, findings, engine, settings, shape, cached, batch)
            findings.attempt(settings, f"{shape}, {batch} drafts after {cached} positions", SECONDS, compare)
        for length in positions:  # the last, because prefills overwrite the random caches
            compare = partial(compare_prefills, findings, engine, shape, length)
            findings.attempt(settings, f"{shape}, prefill of {length} tokens", SECONDS, compare)
        del engine, compare
        free_models()
    check_all_equal(findings)


def check_all_equal(findings: Findings) -> None:
    """DifferentBitsError if a comparison found a difference."""
    if different := [row for row in findings.result.get("exactness", ()) if not row["equal"]]:
        raise DifferentBitsError(f"{len(different)} comparisons found different bits")


# --- Steps and verifications


def compare_passes(findings: Findings, engine: Engine, settings: Settings, shape: str, cached: int) -> None:
    """Compare steps, verifications and ragged batches of several sequences with each sequence alone."""
    batches, rng = settings.sizes.batches, random.Random(cached)
    texts = [[rng.randrange(engine.vocab_size) for _ in range(TOKENS)] for _ in range(max(batches))]
    referred = sorted({round(i * (len(texts) - 1) / (MAX_REFERENCES - 1)) for i in range(MAX_REFERENCES)})
    with engine.forward_pass.eager():
        alone = [logits_of(engine, passes) for slot in referred for passes in steps([slot], texts, cached)]
    reference = {place: logits for rows in alone for place, logits in rows.items()}
    for batch in batches:
        slots = [*referred, *(slot for slot in range(len(texts)) if slot not in referred)][:batch]
        rng.shuffle(slots)
        kinds: dict[str, Callable[[], Sequence[Sequence[Span]]]] = {
            "step": partial(steps, slots, texts, cached),
            "verification": partial(verification, slots, texts, cached),
            "ragged": partial(ragged, slots, texts, cached, rng),
        }
        for (what, passes), how in product(kinds.items(), hows(engine)):
            facts = {"model": shape, "what": what, "sequences": batch, "positions": cached, "how": how}
            add_row(findings, facts, reference, run_repeatedly(engine, passes, how))


def steps(slots: Sequence[int], texts: Sequence[Sequence[int]], cached: int) -> list[list[Span]]:
    return [[Span(slot, cached + at, texts[slot][at : at + 1], 1) for slot in slots] for at in range(TOKENS)]


def verification(slots: Sequence[int], texts: Sequence[Sequence[int]], cached: int) -> list[list[Span]]:
    """One pass of all tokens of each sequence."""
    return [[Span(slot, cached, texts[slot], TOKENS) for slot in slots]]


def ragged(slots: Sequence[int], texts: Sequence[Sequence[int]], cached: int, rng: random.Random) -> list[list[Span]]:
    """A pass in which sequences have different numbers of tokens, in another order and combination each time."""
    counts, order = [1 + index % TOKENS for index in range(len(slots))], list(slots)
    rng.shuffle(counts)
    rng.shuffle(order)
    return [[Span(slot, cached, texts[slot][:count], count) for slot, count in zip(order, counts, strict=True)]]


def hows(engine: Engine) -> tuple[str, ...]:
    return ("launched", "replayed") if is_captured(engine) else ("launched",)


def run_repeatedly(engine: Engine, passes: Callable[[], Sequence[Sequence[Span]]], how: str) -> list[Rows]:
    with engine.forward_pass.eager() if how == "launched" else nullcontext():
        return [
            logits_of(engine, spans)
            for _ in range(REPEATS if how == "replayed" else 1) for spans in passes()
        ]  # fmt: skip


def logits_of(engine: Engine, spans: Sequence[Span]) -> Rows:
    return dict(zip(places_of(spans), engine.forward(spans), strict=True))


def places_of(spans: Sequence[Span]) -> list[tuple[int, int]]:
    """Slot and position of each row of logits."""
    return [(span.slot, at) for span in spans for at in range(span.end - span.num_logits, span.end)]


def add_row(findings: Findings, facts: Row, reference: Rows, runs: Sequence[Rows]) -> None:
    """Add a row: how many rows of logits differ from the reference, of those that have one.

    They are not equal if `facts` say that the cache is not the same.
    """
    pairs = [(reference[place], logits) for rows in runs for place, logits in rows.items() if place in reference]
    different = sum(not torch.equal(*pair) for pair in pairs)
    equal = not different and facts.get("same_cache", True)
    findings.add_row("exactness", {**facts, "rows": len(pairs), "different": different, "equal": equal})


# --- Hidden states


def compare_states(findings: Findings, engine: Engine, settings: Settings, shape: str, cached: int) -> None:
    """Compare logits and states of verifications, for two choices of layers in turn, with each sequence alone.

    The layers are those of EAGLE-3 and EAGLE-1.
    """
    count, rng = engine.facts.layers, random.Random(cached)
    choices: tuple[tuple[int, ...], ...] = (tuple(eagle_layers(count)), (count,))
    texts = [[rng.randrange(engine.vocab_size) for _ in range(TOKENS)] for _ in range(max(settings.sizes.batches))]
    referred = range(min(MAX_REFERENCES, len(texts)))
    references: dict[tuple[int, ...], Rows] = {layers: {} for layers in choices}
    with engine.forward_pass.eager():
        for layers, slot in product(choices, referred):
            references[layers] |= states_of(engine, verification([slot], texts, cached)[0], layers)
    for batch, how in product(settings.sizes.batches, hows(engine)):
        (spans,) = verification(range(batch), texts, cached)
        runs: dict[tuple[int, ...], list[Rows]] = {layers: [] for layers in choices}
        with engine.forward_pass.eager() if how == "launched" else nullcontext():
            for _, layers in product(range(REPEATS), choices):
                runs[layers].append(states_of(engine, spans, layers))
        for layers, found in runs.items():
            what = f"states after layers {', '.join(map(str, layers))}"
            facts = {"model": shape, "what": what, "sequences": batch, "positions": cached, "how": how}
            add_row(findings, facts, references[layers], found)


def states_of(engine: Engine, spans: Sequence[Span], layers: tuple[int, ...]) -> Rows:
    """Logits and states of spans, joined."""
    spans = [replace(span, num_states=span.num_logits) for span in spans]
    joined = torch.cat([each.float() for each in engine.forward_with_states(spans, layers)], 1)
    return dict(zip(places_of(spans), joined, strict=True))


# --- Prefills


def compare_prefills(findings: Findings, engine: Engine, shape: str, length: int) -> None:
    """Compare logits and cache after a prompt in chunks of several sizes, alone and beside a decoding sequence.

    The reference runs the last tokens one by one.
    """
    rng = random.Random(length)
    tokens = [rng.randrange(engine.vocab_size) for _ in range(length)]
    sizes = [size for size in CHUNKS if length / size <= MAX_PASSES and size < 2 * length]
    with engine.forward_pass.eager():
        reference = prefill(engine, tokens[:-LAST], sizes[0])
        for at in range(length - LAST, length):
            reference |= logits_of(engine, [Span(0, at, tokens[at : at + 1], 1)])
    expected = last_layer(engine, length)
    for size, how, beside in product(sizes, hows(engine), (0, 1)):
        with engine.forward_pass.eager() if how == "launched" else nullcontext():
            rows = prefill(engine, tokens, size, beside)
        same_cache = all(map(torch.equal, last_layer(engine, length), expected))
        facts = {
            "model": shape, "what": f"prefill in chunks of {size}", "sequences": 1 + beside, "positions": length,
            "how": how, "same_cache": same_cache,
        }  # fmt: skip
        add_row(findings, facts, reference, [rows])


def prefill(engine: Engine, tokens: Sequence[int], size: int, beside: int = 0) -> Rows:
    """Logits of the last tokens of a prompt in slot 0. `beside`: sequences that decode in the same passes."""
    rows: Rows = {}
    for at in range(0, len(tokens), size):
        chunk = tokens[at : at + size]
        num_logits = min(len(chunk), max(0, at + len(chunk) - (len(tokens) - LAST)))
        others = [Span(1, at, [5], 1)] * beside
        rows |= logits_of(engine, [*others, Span(0, at, chunk, num_logits)])
    return {place: logits for place, logits in rows.items() if place[0] == 0}


def last_layer(engine: Engine, length: int) -> list[torch.Tensor]:
    arena = engine.layout.arena
    columns = arena.columns_of(0, 0, length)
    return [cache[:, columns] for cache in (arena.keys[-1], arena.values[-1])]


# --- Drafts


def compare_drafts(
    findings: Findings, engine: Engine, settings: Settings, shape: str, cached: int, batch: int
) -> None:  # fmt: skip
    """Compare the tokens of the draft loop, launched and replayed, with those of single steps."""
    count, spans = settings.sizes.num_draft_tokens, spans_after(cached, batch)
    with engine.forward_pass.eager():
        reference = draft_by_steps(engine, spans, count)
    ways = {"single steps": draft_by_steps, "draft loop": draft_by_loop}
    for what, way in ways.items():
        drafts = [own for _ in range(REPEATS) for own in way(engine, spans, count) or ()]
        different = sum(one != other for one, other in zip(drafts, cycle(reference), strict=False))
        findings.add_row("exactness", {
            "model": shape, "what": what, "sequences": batch, "positions": cached, "how": hows(engine)[-1],
            "rows": len(drafts), "different": different, "equal": not different,
        })  # fmt: skip
