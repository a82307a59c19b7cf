"""KV layouts: which columns of an extent hold a sequence's positions, and what moves before a forward pass."""

from abc import ABC, abstractmethod
from collections.abc import Sequence

from specpool.engine.cache.arena import KVArena
from specpool.engine.cache.extents import Extents
from specpool.engine.cache.spans import Span


class KVLayout(ABC):
    """Maps positions to columns: position p of a sequence is cached in column `start + p` of its extent."""

    spare_columns = False  # whether sequences may start after column 0, so that extents need extra columns

    def __init__(self, arena: KVArena, extents: Extents) -> None:
        self.arena, self.extents = arena, extents
        extents.move = arena.move

    def origin(self, slot: int) -> int:
        return self.extents.origins[slot]

    @abstractmethod
    def align(self, spans: Sequence[Span]) -> list[int]:
        """Move cached positions to the columns that the pass needs. Returns the start of each sequence."""

    def copy(self, source: int, destination: int, count: int) -> None:
        """Copy the first `count` positions of one slot into another."""
        self.arena.move(self.origin(source), self.origin(destination), count)


class SlotLayout(KVLayout):
    """In-place layout: sequences start at column 0, and new tokens overwrite rejected positions."""

    def align(self, spans: Sequence[Span]) -> list[int]:
        return [0] * len(spans)


class PaddedLayout(KVLayout):
    """Left-padded batch as in EQSPEC (arXiv 2510.22876): all sequences of a pass end in the same column.

    Sequences gain different numbers of tokens, so most of them move after every round. The longest one starts at
    column 0, so padding never accumulates. Padding is a number of columns, not a token id.
    """

    spare_columns = True

    def __init__(self, arena: KVArena, extents: Extents) -> None:
        super().__init__(arena, extents)
        self._starts = [0] * len(extents.origins)

    def align(self, spans: Sequence[Span]) -> list[int]:
        """Right-align the sequences, moving only those whose start has changed."""
        right_edge = max(span.end for span in spans)
        starts = [right_edge - span.end for span in spans]
        for span, start in zip(spans, starts, strict=True):
            if span.start and start != self._starts[span.slot]:
                origin = self.origin(span.slot)
                self.arena.move(origin + self._starts[span.slot], origin + start, span.start)
            self._starts[span.slot] = start
        return starts

    def copy(self, source: int, destination: int, count: int) -> None:
        """Copy positions to the same columns of the other extent; the next pass realigns them."""
        start = self._starts[destination] = self._starts[source]
        self.arena.move(self.origin(source) + start, self.origin(destination) + start, count)


LAYOUTS: dict[str, type[KVLayout]] = {"slots": SlotLayout, "padded": PaddedLayout}
