"""What a forward pass takes by its new tokens and by what is cached: draft lengths are chosen by it."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from engine.cache.slots import Slot
from engine.cache.spans import Span
from engine.engine import STEP_CACHED, Engine

ROWS = (1, 2, 4, 8, 16, 32, 64)
# Sequences of a pass, at most.
SEQUENCES = 16
# Positions cached of the pass that tells what longer sequences cost.
LONG = 4 * STEP_CACHED
# Passes of each kind, of which the fastest counts: the first one of a shape prepares it.
REPEATS = 3


@torch.inference_mode()
def measure_step_times(engine: Engine, numbers: Sequence[int] = ROWS) -> dict[int, float]:
    """Seconds of a pass by its new tokens, of these numbers. Uses the engine's own slots, which must be free."""
    with _slots(engine, STEP_CACHED + max(numbers)) as slots:
        passes = {rows: _spans(slots, rows) for rows in numbers}
        return {rows: _fastest(engine, spans) for rows, spans in passes.items() if spans}


@torch.inference_mode()
def measure_seconds_per_cached(engine: Engine) -> float:
    """Seconds that each new token takes more for every position more that is cached. Uses slots likewise."""
    with _slots(engine, LONG + 1) as slots:
        short, long = min(STEP_CACHED, slots[0].room - 1), slots[0].room - 1
        if long == short:
            return 0.0
        times = [_fastest(engine, [Span(slot.index, cached, [0], 1) for slot in slots]) for cached in (short, long)]
        return max(0.0, times[1] - times[0]) / len(slots) / (long - short)


@contextmanager
def _slots(engine: Engine, room: int) -> Iterator[list[Slot]]:
    """As many slots as a pass may have sequences, with room for so many positions each, as far as there is any."""
    keys = [("step-times", i) for i in range(min(SEQUENCES, engine.slots.total))]
    taken = [engine.slots.take(key, min(room, engine.max_model_len)) for key in keys]
    try:
        yield [slot for slot in taken if slot is not None]
    finally:
        engine.slots.release(keys)
        engine.slots.drop_released()


def _spans(slots: Sequence[Slot], rows: int) -> list[Span]:
    """So many new tokens, over as many sequences as there are; none if they have no room."""
    each = [rows // len(slots) + (i < rows % len(slots)) for i in range(len(slots))]
    if max(each) > min(slot.room for slot in slots):
        return []
    return [
        Span(slot.index, min(STEP_CACHED, slot.room - count), [0] * count, count)
        for slot, count in zip(slots, each, strict=True)
        if count
    ]


def _fastest(engine: Engine, spans: Sequence[Span]) -> float:
    return min(_seconds(engine, spans) for _ in range(REPEATS))


def _seconds(engine: Engine, spans: Sequence[Span]) -> float:
    began = time.perf_counter()
    engine.forward(spans).argmax(-1).tolist()
    return time.perf_counter() - began
