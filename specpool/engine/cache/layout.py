"""KV layouts: which logical columns hold a sequence's positions, and what moves before a forward pass."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace

from specpool.engine.cache.arena import KVArena
from specpool.engine.cache.spans import Span

PAGE_SIZE = 16
"""Columns of a page: few enough that short sequences waste little memory and share most of a prefix."""


class KVLayout(ABC):
    """Maps positions to logical columns."""

    is_padded = False
    """Whether sequences may start after column 0, so that their only page needs extra columns."""

    def __init__(self, arena: KVArena) -> None:
        self.arena = arena

    @abstractmethod
    def align(self, spans: Sequence[Span]) -> Sequence[Span]:
        """Move cached positions to the columns that the pass needs. Return the spans with their offsets."""


class SlotLayout(KVLayout):
    """In-place layout: position p lies in logical column p, and new tokens overwrite rejected positions."""

    def align(self, spans: Sequence[Span]) -> Sequence[Span]:
        return spans


class PaddedLayout(KVLayout):
    """Left-padded batch as in EQSPEC (arXiv 2510.22876): all sequences of a pass end in the same column.

    Sequences gain different numbers of tokens, so most of them move after every round. The longest one starts at
    column 0, so padding never accumulates. Padding is a number of columns, not a token id. A sequence has one page.
    """

    is_padded = True

    def __init__(self, arena: KVArena) -> None:
        super().__init__(arena)
        self._starts = [0] * len(arena.tables)

    def align(self, spans: Sequence[Span]) -> Sequence[Span]:
        """Right-align the sequences, moving only those whose start has changed."""
        right_edge = max(span.end for span in spans)
        aligned = [replace(span, offset=right_edge - span.end) for span in spans]
        for span in aligned:
            before, self._starts[span.slot] = self._starts[span.slot], span.offset
            if span.start and span.offset != before:
                self._move(span.slot, before, span.offset, span.start)
        return aligned

    def _move(self, slot: int, source: int, destination: int, count: int) -> None:
        """Copy `count` columns of all layers within the page of a slot; the ranges may overlap."""
        (origin,) = self.arena.columns_of(slot, 0, 1)
        source, destination = origin + source, origin + destination
        # One layer at a time keeps the temporary copy small.
        for cache in (*self.arena.keys, *self.arena.values):
            cache[:, destination : destination + count] = cache[:, source : source + count].clone()


LAYOUTS: dict[str, type[KVLayout]] = {"slots": SlotLayout, "padded": PaddedLayout}
