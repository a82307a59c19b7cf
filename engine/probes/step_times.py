"""Measures the seconds of a forward pass by its new tokens and its cached positions; draft lengths depend on them."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from engine.cache.slots import Slot
from engine.cache.spans import Span
from engine.engine import STEP_CACHED, Engine

ROWS = (1, 2, 4, 8, 16, 32, 64)
# Greatest number of sequences in a measured pass.
SEQUENCES = 16
# Cached positions of each sequence in the pass that shows the cost of longer sequences.
LONG = 4 * STEP_CACHED
# Passes of each kind, of which the fastest counts: the first pass of a shape also prepares it.
REPEATS = 3


@torch.inference_mode()
def measure_step_times(engine: Engine, numbers: Sequence[int] = ROWS) -> dict[int, float]:
    """Seconds of a pass for each of these numbers of new tokens. Uses the slots of the engine, which must be free."""
    with _slots(engine, STEP_CACHED + max(numbers)) as slots:
        passes = {rows: _spans(slots, rows) for rows in numbers}
        return {rows: _fastest(engine, spans) for rows, spans in passes.items() if spans}


@torch.inference_mode()
def measure_seconds_per_cached(engine: Engine) -> float:
    """Extra seconds per new token and additional cached position. Uses the slots of the engine, which must be free."""
    with _slots(engine, LONG + 1) as slots:
        short, long = min(STEP_CACHED, slots[0].capacity - 1), slots[0].capacity - 1
        if long == short:
            return 0.0
        times = [_fastest(engine, [Span(slot.index, cached, [0], 1) for slot in slots]) for cached in (short, long)]
        return max(0.0, times[1] - times[0]) / len(slots) / (long - short)


@contextmanager
def _slots(engine: Engine, room: int) -> Iterator[list[Slot]]:
    """Slots for the sequences of a pass, each with room for `room` positions, as far as the cache has any."""
    keys = [("step-times", i) for i in range(min(SEQUENCES, engine.slots.total))]
    taken = [engine.slots.take(key, min(room, engine.max_model_len)) for key in keys]
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


def _fastest(engine: Engine, spans: Sequence[Span]) -> float:
    """Seconds of the fastest of a few passes."""
    return min(_seconds(engine, spans) for _ in range(REPEATS))


def _seconds(engine: Engine, spans: Sequence[Span]) -> float:
    began = time.perf_counter()
    engine.forward(spans).argmax(-1).tolist()
    return time.perf_counter() - began
