"""Commands that rank 0 sends to the other ranks while it serves: passes to run, columns to move, probes to make."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum, auto
from itertools import accumulate, chain, pairwise

import numpy as np

from specpool.engine.cache.spans import Location, Span


class Kind(IntEnum):
    """Kinds of commands; the first number of each."""

    RUN = auto()
    MOVE = auto()
    PROBE = auto()
    END_PROBE = auto()
    END = auto()


@dataclass(frozen=True)
class Run:
    """Run a pass."""

    spans: Sequence[Span]
    locations: Sequence[Location]

    def encoded(self) -> bytes:
        """Kind, number of spans, six numbers of each span, then all tokens: 64-bit integers, as in every command."""
        each = (
            (span.slot, span.start, len(span.token_ids), span.num_logits, location.origin, location.start)
            for span, location in zip(self.spans, self.locations, strict=True)
        )
        tokens = chain.from_iterable(span.token_ids for span in self.spans)
        return _bytes(chain((Kind.RUN, len(self.spans)), *each, tokens))


@dataclass(frozen=True)
class Move:
    """Move columns of the cache: the arguments of `KVArena.move`."""

    source: int
    destination: int
    count: int

    def encoded(self) -> bytes:
        """Kind and arguments."""
        return _bytes((Kind.MOVE, self.source, self.destination, self.count))


@dataclass(frozen=True)
class Probe:
    """Begin to probe the operations of passes, or end it and report."""

    ends: bool = False

    def encoded(self) -> bytes:
        """Kind alone."""
        return _bytes((Kind.END_PROBE if self.ends else Kind.PROBE,))


@dataclass(frozen=True)
class End:
    """End the process: rank 0 stops in order."""

    def encoded(self) -> bytes:
        """One number."""
        return _bytes((Kind.END,))


def decoded(message: bytes) -> Run | Move | Probe | End:
    """The command of a message."""
    kind, *numbers = np.frombuffer(message, np.int64).tolist()
    if kind == Kind.RUN:
        return _run(numbers)
    if kind == Kind.MOVE:
        return Move(*numbers)
    if kind == Kind.END:
        return End()
    return Probe(ends=kind == Kind.END_PROBE)


def _run(numbers: list[int]) -> Run:
    count, rest = numbers[0], numbers[1:]
    each = [rest[6 * i : 6 * i + 6] for i in range(count)]
    ends = accumulate((tokens for _, _, tokens, *_ in each), initial=6 * count)
    spans = [
        Span(slot, start, rest[begin:end], num_logits)
        for (slot, start, _, num_logits, _, _), (begin, end) in zip(each, pairwise(ends), strict=True)
    ]
    return Run(spans, [Location(origin, start) for *_, origin, start in each])


def _bytes(numbers: Iterator[int] | Sequence[int]) -> bytes:
    return np.fromiter(numbers, np.int64).tobytes()
