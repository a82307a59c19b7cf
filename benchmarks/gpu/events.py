"""Times of the parts of a round: when the device and the host reach each of them."""

import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import wraps
from itertools import chain
from typing import Any
from unittest.mock import patch

import torch

from benchmarks.gpu.part import Row

BEGIN, REPLY, WAIT = "begin", "reply", "wait"
Call = tuple[Any, str, str]
"""An object or class, the name of its function, and the part of the round that it runs."""
# The ways to wait for a device. Tensors of a CPU are read without waiting.
READS = tuple((torch.Tensor, name) for name in ("tolist", "item", "cpu"))
SYNCHRONIZATIONS = tuple((owner, "synchronize") for owner in (torch.cuda.Event, torch.cuda.Stream, torch.cuda))


@dataclass(frozen=True)
class Mark:
    part: str
    seconds: float
    """Time of the host."""
    event: Any
    """Reached by the device after the work launched so far; None on a CPU, and for waits."""

    def milliseconds_after(self, other: "Mark") -> float:
        """Milliseconds of the device since another mark."""
        if self.event is None:
            return 1000 * (self.seconds - other.seconds)
        elapsed: float = other.event.elapsed_time(self.event)
        return elapsed


class Recorder:
    """Marks the start and end of the parts of a round, and of waits, without changing what runs."""

    def __init__(self, device: str) -> None:
        self._is_gpu = torch.device(device).type == "cuda"
        self._marks: list[Mark] = []
        self._is_inside = False
        """Whether a part is running. Parts inside it are not marked."""

    @contextmanager
    def recording(self, calls: Iterable[Call]) -> Iterator[None]:
        """Mark these calls, and waits, within this context."""
        with ExitStack() as stack:
            for owner, name, part in calls:
                self._replace(stack, owner, name, part, lambda *_: True)
            for owner, name in chain(READS, SYNCHRONIZATIONS if self._is_gpu else ()):
                is_read = owner is torch.Tensor
                self._replace(stack, owner, name, WAIT, lambda first, is_read=is_read: not is_read or first.is_cuda)
            yield

    def round(self, work: Callable[[], Any]) -> tuple[Any, Row]:
        """Run a round. Return its result, and the times of its parts."""
        self._marks = []
        self._mark(BEGIN)
        result = work()
        self._mark(REPLY)
        marks, self._marks = self._marks, []
        if self._is_gpu:
            torch.cuda.synchronize()
        return result, times_of(marks)

    def _mark(self, part: str) -> None:
        event = None
        if self._is_gpu and part != WAIT:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
        self._marks.append(Mark(part, time.perf_counter(), event))

    def _replace(self, stack: ExitStack, owner: Any, name: str, part: str, applies: Callable[..., bool]) -> None:
        call = getattr(owner, name)

        @wraps(call)
        def marked(*arguments: Any, **options: Any) -> Any:
            if (part != WAIT and self._is_inside) or not applies(*arguments[:1] or (None,)):
                return call(*arguments, **options)
            was_inside, self._is_inside = self._is_inside, True
            self._mark(part)
            result = call(*arguments, **options)
            self._mark(part)
            self._is_inside = was_inside
            return result

        stack.enter_context(patch.object(owner, name, marked))


def times_of(marks: Sequence[Mark]) -> Row:
    """Milliseconds of each part on the device, and of the host since the round began.

    `choose`: from the target's last pass to the draft's first one. `copy`: from the end of the last part until the host
    has read the result, provided that the device was idle at the start.
    """
    begin, *rest, reply = marks
    parts = [mark for mark in rest if mark.part != WAIT]
    waits = [mark for mark in rest if mark.part == WAIT][1::2]
    row: Row = {"prepare_ms": parts[0].milliseconds_after(begin)} if parts else {}
    ends = dict[str, Mark]()
    for first, last in zip(parts[::2], parts[1::2], strict=True):
        if first.part == "draft" and "draft" not in ends and "target" in ends:
            row["choose_ms"] = first.milliseconds_after(ends["target"])
        row[f"{first.part}_ms"] = row.get(f"{first.part}_ms", 0.0) + last.milliseconds_after(first)
        ends[first.part] = last
    read = (waits or [reply])[-1]
    if parts:
        row["copy_ms"] = 1000 * (read.seconds - begin.seconds) - parts[-1].milliseconds_after(begin)
        row["launched_ms"] = 1000 * (parts[-1].seconds - begin.seconds)
    row["synced_ms"], row["reply_ms"] = (1000 * (mark.seconds - begin.seconds) for mark in (read, reply))
    return {**row, "waits": len(waits)}


def medians(rows: Sequence[Row]) -> Row:
    """The median of each measure over the rows that have it."""
    names = dict.fromkeys(name for row in rows for name in row)
    found = {name: statistics.median_low(row[name] for row in rows if name in row) for name in names}
    return {name: value if isinstance(value, int) else round(value, 3) for name, value in found.items()}
