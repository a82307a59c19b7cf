"""Measures the seconds of a forward pass by its new tokens and its cached positions; draft lengths depend on them."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from specpool.engine.cache.slots import Slot
from specpool.engine.cache.spans import Span
from specpool.engine.run.engine import STEP_CACHED, Engine
from specpool.engine.sampling.sampler import largest
from specpool.protocol.rounds import MAX_DRAFT_TOKENS

# Greatest number of sequences in a measured pass, and in those that show the cost of longer sequences.
SEQUENCES, LONGER_SEQUENCES = 64, 16
# Cached positions of each sequence in the pass that shows the cost of longer sequences.
LONG = 4 * STEP_CACHED
# Passes of each kind, of which the fastest counts: the first pass of a shape also prepares it. The third one is left
# out if the first two took this number of seconds.
REPEATS, ENOUGH_SECONDS = 3, 0.1
# Further numbers of rows that are measured on a CPU: the first of another tile of products, and those half way to the
# next power of two. The first row of a tile costs as much as several later ones.
STEPS_ON_CPU = (9, 12, 17, 24)
LEAST_ON_GPU = 4
"""Passes of each kind on a GPU: the second one of a shape records it."""
# Passes of more rows than this are measured only as long as none has taken more than this number of seconds: with more
# rows the time of a pass grows evenly, and measuring it would delay the start.
ALWAYS_ROWS, LONG_SECONDS = 64, 0.1


@torch.inference_mode()
def measure_step_times(engine: Engine, numbers: Sequence[int] | None = None) -> dict[int, float]:
    """Seconds of a pass for each of these numbers of new tokens. Uses the slots of the engine, which must be free.

    By default the numbers go up to the most new tokens of a round, or of a pass, as long as passes are short.
    """
    chosen = _row_numbers(engine) if numbers is None else numbers
    times: dict[int, float] = {}
    with _slots(engine, SEQUENCES, max(chosen)) as slots:
        for rows in chosen:
            if numbers is None and rows > ALWAYS_ROWS and max(times.values(), default=0.0) > LONG_SECONDS:
                break
            if spans := _spans(slots, rows):
                times[rows] = _fastest(engine, spans)
    return times


@torch.inference_mode()
def measure_seconds_per_cached(engine: Engine) -> float:
    """Extra seconds per new token and additional cached position. Uses the slots of the engine, which must be free."""
    with _slots(engine, LONGER_SEQUENCES, cached=LONG) as slots:
        short, long = min(STEP_CACHED, slots[0].capacity - 1), slots[0].capacity - 1
        if long == short:
            return 0.0
        passes = [[Span(slot.index, cached, [0], 1) for slot in slots] for cached in (short, long)]
        times = [_fastest(engine, spans, least=REPEATS) for spans in passes]
        return max(0.0, times[1] - times[0]) / len(slots) / (long - short)


def _row_numbers(engine: Engine) -> list[int]:
    """Powers of two, and others where times grow in steps, that are well below the most rows of a round, or of a pass
    if that is less, and that number."""
    most = max(2, min(engine.slots.total * (1 + MAX_DRAFT_TOKENS), engine.max_num_batched_tokens))
    steps = STEPS_ON_CPU if engine.facts.device.type == "cpu" else ()
    numbers = sorted([*(1 << power for power in range(most.bit_length())), *steps])
    return [*(rows for rows in numbers if 3 * rows <= 2 * most), most]


@contextmanager
def _slots(engine: Engine, sequences: int, rows: int = 1, cached: int = STEP_CACHED) -> Iterator[list[Slot]]:
    """Slots for the sequences of a pass, as far as the cache has any: each with room for its `cached` positions, and
    for its part of the new tokens of a pass."""
    keys = [("step-times", i) for i in range(min(sequences, engine.slots.total))]
    room = min(cached - (-rows // len(keys)), engine.max_model_len)
    taken = [engine.slots.take(key, room) for key in keys]
    try:
        yield [slot for slot in taken if slot is not None]
    finally:
        engine.slots.release(keys)
        engine.slots.drop_released()


def _spans(slots: Sequence[Slot], rows: int) -> list[Span]:
    """Spans of `rows` new tokens in all, divided among the slots; none if a slot has no room for its part."""
    each = [rows // len(slots) + (i < rows % len(slots)) for i in range(len(slots))]
    if max(each) > min(slot.capacity for slot in slots):
        return []
    return [
        Span(slot.index, min(STEP_CACHED, slot.capacity - count), [0] * count, count)
        for slot, count in zip(slots, each, strict=True)
        if count
    ]


def _fastest(engine: Engine, spans: Sequence[Span], least: int = 2) -> float:
    """Seconds of the fastest of a few passes, `least` or more."""
    if engine.facts.device.type != "cpu":
        least = max(least, LEAST_ON_GPU)
    times: list[float] = []
    while len(times) < least or (len(times) < REPEATS and sum(times) < ENOUGH_SECONDS):
        times.append(_seconds(engine, spans))
    return min(times)


def _seconds(engine: Engine, spans: Sequence[Span]) -> float:
    began = time.perf_counter()
    largest(engine.forward(spans)).tolist()
    return time.perf_counter() - began
