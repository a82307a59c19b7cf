"""Messages between rank 0 and the other ranks: JSON while they start, and 64-bit integers for each pass."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum, auto
from itertools import accumulate, chain, pairwise

import numpy as np
from pydantic import BaseModel

from specpool.engine.cache.spans import Location, Span
from specpool.engine.config.options import EngineOptions
from specpool.engine.numerics.tiles import Tiles
from specpool.engine.sharding.shares import Sums


class Order(BaseModel):
    """To a rank: what to load, and where to find the other ranks."""

    rank: int
    sums: Sums
    options: EngineOptions
    """The options of the engine, with the device of this rank."""
    exact: bool
    store: str
    """A file, or host and port separated by a space."""


class Loaded(BaseModel):
    """From a rank that has loaded its shard."""

    sums: dict[str, str]
    """Hexadecimal sums of weights by name, for the fingerprint of all weights."""


class Report(BaseModel):
    """From a rank that has built its pass."""

    device: str
    forward_pass: str
    """Class of its pass, which must be the same on all ranks."""
    tiles: Tiles | None
    """Shapes for which its GEMMs are batch invariant; None: there are none."""
    agrees: bool
    """Whether its compiled GEMMs, if any, are batch invariant."""
    kv_limit: int
    """Maximum size of its KV cache in bytes."""
    weight_bytes: int
    weight_kinds: dict[str, int]
    """Bytes of its weights by storage type."""
    activation_bytes: int


class Begin(BaseModel):
    """To a rank: begin to serve."""

    columns: int
    """Columns of the KV cache."""
    tiles: Tiles


class Probed(BaseModel):
    """From a rank: operations that gave equal rows different bits."""

    unequal: list[str]


class Kind(IntEnum):
    """The first integer of each command."""

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
        """Kind, number of spans, six integers per span, then all tokens."""
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
    """Begin to probe the operations of passes, or end the probe and report."""

    ends: bool = False

    def encoded(self) -> bytes:
        """Kind alone."""
        return _bytes((Kind.END_PROBE if self.ends else Kind.PROBE,))


@dataclass(frozen=True)
class End:
    """End the process in an orderly stop."""

    def encoded(self) -> bytes:
        """Kind alone."""
        return _bytes((Kind.END,))


Command = Run | Move | Probe | End


def decode_command(message: bytes) -> Command:
    """The command that `encoded` made the message of."""
    kind, *numbers = np.frombuffer(message, np.int64).tolist()
    if kind == Kind.RUN:
        return _decode_run(numbers)
    if kind == Kind.MOVE:
        return Move(*numbers)
    if kind == Kind.END:
        return End()
    return Probe(ends=kind == Kind.END_PROBE)


def _decode_run(numbers: list[int]) -> Run:
    count, rest = numbers[0], numbers[1:]
    headers = [rest[6 * i : 6 * i + 6] for i in range(count)]
    ends = accumulate((tokens for _, _, tokens, *_ in headers), initial=6 * count)
    spans = [
        Span(slot, start, rest[begin:end], num_logits)
        for (slot, start, _, num_logits, _, _), (begin, end) in zip(headers, pairwise(ends), strict=True)
    ]
    return Run(spans, [Location(origin, start) for *_, origin, start in headers])


def _bytes(numbers: Iterator[int] | Sequence[int]) -> bytes:
    return np.fromiter(numbers, np.int64).tobytes()
