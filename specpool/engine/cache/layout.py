"""KV layouts map a sequence's positions to logical columns, and may move them before a forward pass."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace

import torch

from specpool.engine.cache.arena import KVArena
from specpool.engine.cache.spans import Span

PAGE_SIZE, GPU_PAGE_SIZE = 32, 64
"""Columns per page. Small pages waste little memory on short sequences and let them share most of a prefix.

A GPU loads keys in blocks of up to 64 positions. A block inside one page needs a single page table entry.
"""


def page_size_of(device: torch.device) -> int:
    """Return the columns per page on a device. The padded layout uses one page per sequence instead."""
    return PAGE_SIZE if device.type == "cpu" else GPU_PAGE_SIZE


class KVLayout(ABC):
    """Maps positions to logical columns."""

    is_padded = False
    """Whether a sequence has a single page and may start after its column 0, which takes extra columns."""

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
        """Copy `count` columns of all layers within a slot's page. The ranges may overlap."""
        (origin,) = self.arena.columns_of(slot, 0, 1)
        self.arena.move(origin + source, origin + destination, count)


LAYOUTS: dict[str, type[KVLayout]] = {"slots": SlotLayout, "padded": PaddedLayout}
