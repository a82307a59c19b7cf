"""Measures the seconds of a forward pass by its new tokens and cached positions, on which draft lengths depend."""

import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch

from specpool.engine.cache.slots import Slot
from specpool.engine.cache.spans import Span
from specpool.engine.run.engine import STEP_CACHED, Engine
from specpool.engine.sampling.sampler import largest
from specpool.protocol.rounds import MAX_DRAFT_TOKENS

# Maximum sequences of a measured pass, and of a pass that shows the cost of longer sequences.
SEQUENCES, LONGER_SEQUENCES = 64, 16
# Cached positions per sequence in a pass that shows the cost of longer sequences.
LONG = 4 * STEP_CACHED
# The fastest of REPEATS passes counts. Two passes are enough if they take ENOUGH_SECONDS together.
REPEATS, ENOUGH_SECONDS = 3, 0.1
# Further row counts to measure on a CPU, besides powers of two: the first row of a GEMM tile costs as much as several
# later rows.
STEPS_ON_CPU = (9, 12, 17, 24)
# Above ALWAYS_ROWS rows, stop measuring once a pass takes LONG_SECONDS: beyond, times grow linearly.
ALWAYS_ROWS, LONG_SECONDS = 64, 0.1


@torch.inference_mode()
def measure_step_times(engine: Engine, row_counts: Sequence[int] | None = None) -> dict[int, float]:
    """Seconds of a pass by its new tokens. All slots of the engine must be free.

    By default, row counts go up to the maximum of a round or of a pass, as long as passes are short.
    """
    counts = _row_counts(engine) if row_counts is None else row_counts
    times: dict[int, float] = {}
    with _slots(engine, SEQUENCES, max(counts)) as slots:
        for rows in counts:
            if row_counts is None and rows > ALWAYS_ROWS and max(times.values(), default=0.0) > LONG_SECONDS:
                break
            if spans := _spans(engine, slots, rows):
                times[rows] = _fastest(engine, spans)
    return times


@contextmanager
def timed_passes(engine: Engine, row_counts: Sequence[int]) -> Iterator[dict[int, Callable[[], float]]]:
    """Functions, by rows, that run one pass and return its seconds. Passes too large for the cache have none.

    All slots of the engine must be free. Within the context they are taken.
    """
    with torch.inference_mode(), _slots(engine, SEQUENCES, max(row_counts)) as slots:
        spans = {rows: _spans(engine, slots, rows) for rows in row_counts}
        yield {rows: partial(_seconds, engine, members) for rows, members in spans.items() if members}


@torch.inference_mode()
def measure_seconds_per_cached(engine: Engine) -> float:
    """Extra seconds per new token and additional cached position. All slots of the engine must be free."""
    with _slots(engine, LONGER_SEQUENCES, cached=LONG) as slots:
        long = min(engine.slots.capacity(slots[0]), engine.max_model_len) - 1
        short = min(STEP_CACHED, long)
        if long == short:
            return 0.0
        passes = [[Span(slot.index, cached, [0], 1) for slot in slots] for cached in (short, long)]
        times = [_fastest(engine, spans, min_repeats=REPEATS) for spans in passes]
        return max(0.0, times[1] - times[0]) / len(slots) / (long - short)


def _row_counts(engine: Engine) -> list[int]:
    """The maximum rows of a round or of a pass, and smaller counts: powers of two, and `STEPS_ON_CPU`."""
    max_rows = max(2, min(engine.slots.total * (1 + MAX_DRAFT_TOKENS), engine.max_num_batched_tokens))
    steps = STEPS_ON_CPU if engine.facts.device.type == "cpu" else ()
    counts = sorted([*(1 << power for power in range(max_rows.bit_length())), *steps])
    return [*(rows for rows in counts if 3 * rows <= 2 * max_rows), max_rows]


@contextmanager
def _slots(engine: Engine, sequences: int, rows: int = 1, cached: int = STEP_CACHED) -> Iterator[list[Slot]]:
    """Up to `sequences` slots, each with room for `cached` positions and its part of a pass of `rows` rows."""
    keys = [("step-times", i) for i in range(min(sequences, engine.slots.total))]
    room = min(cached - (-rows // len(keys)), engine.max_model_len)
    taken = [engine.slots.take(key, room) for key in keys]
    try:
        yield [slot for slot in taken if slot is not None]
    finally:
        engine.slots.release(keys)


def _spans(engine: Engine, slots: Sequence[Slot], rows: int) -> list[Span]:
    """Return spans of `rows` new tokens in total, spread over the slots; none if a slot is too small for its share.

    Tokens are random, because equal tokens would all choose the same experts. Recurrent layers get a state before each
    span.
    """
    counts = [rows // len(slots) + (i < rows % len(slots)) for i in range(len(slots))]
    room = min(engine.max_model_len, *map(engine.slots.capacity, slots))
    if max(counts) > room:
        return []
    rng, vocabulary = random.Random(0), range(engine.vocab_size)
    spans = [
        Span(slot.index, min(STEP_CACHED, room - count), rng.choices(vocabulary, k=count), count)
        for slot, count in zip(slots, counts, strict=True)
        if count
    ]
    if engine.facts.recurrent is not None:  # so that the passes begin with states, as rounds do
        engine.forward([Span(span.slot, span.start - 1, [0], 0) for span in spans if span.start])
    return spans


def _fastest(engine: Engine, spans: Sequence[Span], min_repeats: int = 2) -> float:
    """Seconds of the fastest of at least `min_repeats` passes."""
    times: list[float] = []
    while len(times) < min_repeats or (len(times) < REPEATS and sum(times) < ENOUGH_SECONDS):
        times.append(_seconds(engine, spans))
    return min(times)


def _seconds(engine: Engine, spans: Sequence[Span]) -> float:
    began = time.perf_counter()
    largest(engine.forward(spans)).tolist()
    return time.perf_counter() - began
