"""KV layouts: in which column of its slot a sequence's positions lie, and what has to move before a forward pass."""

from abc import ABC, abstractmethod
from collections.abc import Sequence

from engine.kv_cache import KVArena
from engine.packing import Span


class KVLayout(ABC):
    """Position p of a sequence lies in column `start + p` of its slot; `align` says where sequences start."""

    spare_columns = False
    """Whether a sequence of full length may start behind column 0, so that slots need room beyond it."""

    def __init__(self, arena: KVArena) -> None:
        self.arena = arena

    @abstractmethod
    def align(self, spans: Sequence[Span]) -> list[int]:
        """Brings the cached positions of these sequences where the pass of the new tokens needs them; their starts."""

    def copy(self, source: int, destination: int, count: int) -> None:
        """Copies the first `count` positions of one slot's sequence into another slot."""
        self.arena.copy(source, destination, 0, count)


class SlotLayout(KVLayout):
    """In place: every sequence starts at column 0 for ever, and what was rejected is overwritten. Nothing moves."""

    def align(self, spans: Sequence[Span]) -> list[int]:
        """All start at column 0."""
        return [0] * len(spans)


class PaddedLayout(KVLayout):
    """A left-padded batch, as in EQSPEC (arXiv 2510.22876): all sequences of a pass end in the same column.

    Sequences gain different numbers of tokens, so after a round most must be unpadded, extended and padded anew: their
    cached positions move. The longest starts at column 0, so padding never accumulates; its width is an integer, and
    no token id stands for it.
    """

    spare_columns = True

    def __init__(self, arena: KVArena) -> None:
        super().__init__(arena)
        self._starts = [0] * arena.slots

    def align(self, spans: Sequence[Span]) -> list[int]:
        """Right-aligns the sequences. Those of equal length, in this pass and the last, stay where they are."""
        right_edge = max(span.end for span in spans)
        starts = [right_edge - span.end for span in spans]
        for span, start in zip(spans, starts, strict=True):
            if span.start and start != self._starts[span.slot]:
                self.arena.move(span.slot, self._starts[span.slot], start, span.start)
            self._starts[span.slot] = start
        return starts

    def copy(self, source: int, destination: int, count: int) -> None:
        """To the same columns, wherever they are: the next pass will move them."""
        self._starts[destination] = self._starts[source]
        self.arena.copy(source, destination, self._starts[source], count)


LAYOUTS: dict[str, type[KVLayout]] = {"slots": SlotLayout, "padded": PaddedLayout}
