"""What a forward pass takes by the number of its new tokens: draft lengths are chosen by it, and corrected in use."""

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from engine.packing import Span
from engine.slots import Slot

if TYPE_CHECKING:
    from engine.engine import Engine

ROWS = (1, 2, 4, 8, 16, 32, 64)
# Sequences of a pass at most, and positions that each has cached.
SEQUENCES, CACHED = 16, 128
# Passes of each kind, of which the fastest counts: the first one of a shape prepares it.
REPEATS = 3


@torch.inference_mode()
def measure_step_times(engine: "Engine", numbers: Sequence[int] = ROWS) -> dict[int, float]:
    """Seconds of a pass by its new tokens, of these numbers. Uses the engine's own slots, which must be free."""
    keys = [("step-times", i) for i in range(min(SEQUENCES, engine.slots.total))]
    taken = [engine.slots.take(key, min(CACHED + max(numbers), engine.max_model_len)) for key in keys]
    slots = [slot for slot in taken if slot is not None]
    try:
        passes = {rows: _spans(slots, rows) for rows in numbers}
        return {rows: min(_seconds(engine, spans) for _ in range(REPEATS)) for rows, spans in passes.items() if spans}
    finally:
        engine.slots.release(keys)
        engine.slots.drop_released()


def _spans(slots: Sequence[Slot], rows: int) -> list[Span]:
    """So many new tokens, over as many sequences as there are; none if they have no room."""
    each = [rows // len(slots) + (i < rows % len(slots)) for i in range(len(slots))]
    if max(each) > min(slot.room for slot in slots):
        return []
    return [
        Span(slot.index, min(CACHED, slot.room - count), [0] * count, count)
        for slot, count in zip(slots, each, strict=True)
        if count
    ]


def _seconds(engine: "Engine", spans: Sequence[Span]) -> float:
    began = time.perf_counter()
    engine.forward(spans).argmax(-1).tolist()
    return time.perf_counter() - began
