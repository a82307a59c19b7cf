"""KV layouts: in which columns of its extent a sequence's positions lie, and what has to move before a forward pass."""

from abc import ABC, abstractmethod
from collections.abc import Sequence

from specpool.engine.cache.arena import KVArena
from specpool.engine.cache.extents import Extents
from specpool.engine.cache.spans import Span


class KVLayout(ABC):
    """A rule for where sequences start: position p of a sequence is cached in column `start + p` of its extent."""

    spare_columns = False
    """Whether sequences may start behind column 0, so that extents must be longer than the longest sequence."""

    def __init__(self, arena: KVArena, extents: Extents) -> None:
        self.arena, self.extents = arena, extents
        extents.move = arena.move

    def origin(self, slot: int) -> int:
        """The column of the arena at which a slot's extent begins."""
        return self.extents.origins[slot]

    @abstractmethod
    def align(self, spans: Sequence[Span]) -> list[int]:
        """Moves the cached positions of these sequences to the columns that the pass needs. Returns the starts."""

    def copy(self, source: int, destination: int, count: int) -> None:
        """Copies the first `count` positions of one slot's sequence into another slot."""
        self.arena.move(self.origin(source), self.origin(destination), count)


class SlotLayout(KVLayout):
    """The layout in place: every sequence starts at column 0, rejected positions are overwritten, and nothing moves."""

    def align(self, spans: Sequence[Span]) -> list[int]:
        """Starts of zero; nothing has to move."""
        return [0] * len(spans)


class PaddedLayout(KVLayout):
    """A left-padded batch, as in EQSPEC (arXiv 2510.22876): all sequences of a pass end in the same column.

    Sequences gain different numbers of tokens, so after a round most of them must be unpadded, extended and padded
    again: their cached positions move. The longest starts at column 0, so padding never accumulates; the width of the
    padding is an integer, and no token id stands for it.
    """

    spare_columns = True

    def __init__(self, arena: KVArena, extents: Extents) -> None:
        super().__init__(arena, extents)
        self._starts = [0] * len(extents.origins)

    def align(self, spans: Sequence[Span]) -> list[int]:
        """Right-aligns the sequences. Those whose start is the same as in their last pass stay where they are."""
        right_edge = max(span.end for span in spans)
        starts = [right_edge - span.end for span in spans]
        for span, start in zip(spans, starts, strict=True):
            if span.start and start != self._starts[span.slot]:
                origin = self.origin(span.slot)
                self.arena.move(origin + self._starts[span.slot], origin + start, span.start)
            self._starts[span.slot] = start
        return starts

    def copy(self, source: int, destination: int, count: int) -> None:
        """Copies positions to the same columns of the other extent; the next pass moves them if it has to."""
        start = self._starts[destination] = self._starts[source]
        self.arena.move(self.origin(source) + start, self.origin(destination) + start, count)


LAYOUTS: dict[str, type[KVLayout]] = {"slots": SlotLayout, "padded": PaddedLayout}
