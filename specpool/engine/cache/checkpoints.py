"""Checkpoints of the recurrent states of sequences. Pure bookkeeping, without torch.

A sequence has at most two: the newest one, and the one that its last round began with, so that the round can be
repeated. Rejecting tokens never changes a checkpoint: the next round replays the accepted rows, from the newest
checkpoint at or before its base. The prefix cache keeps checkpoints at page borders, by the digest of the page before.
"""

from collections.abc import Container, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from specpool.engine.cache.pages import PagePool
from specpool.engine.cache.spans import Span

SPACING = 1024
"""The prefix cache keeps the first checkpoint at or after each multiple of this, and those at the ends of prompts."""
NONE = -1


class Segment(NamedTuple):
    """How a pass runs the recurrence of one span.

    Load the state of checkpoint `read`, replay the tail rows from `read_position` to `start`, then run the new rows.
    Write the state before the row at `write_position`, or after the last row if that is the end, to checkpoint `write`.
    """

    first_row: int  # in the packed batch
    num_rows: int
    start: int  # position of the first row
    read: int  # NONE: start from zeros
    read_position: int
    read_tail: int
    write: int  # NONE: write no checkpoint
    write_position: int
    write_tail: int
    """The tail for the inputs and gates of new rows, from `write_position` on. Without a write, it equals `read_tail`,
    and all new rows go there."""


@dataclass(slots=True)
class Checkpoint:
    """A checkpoint of a sequence."""

    position: int
    entry: int
    tail: int
    end: int
    """The position after the last row in its tail."""
    is_prompt: bool = True
    """Whether the passes so far requested no logits, so that all tokens belong to the prompt."""
    is_anchor: bool = False
    """Whether the prefix cache keeps it."""


class Checkpoints:
    """The checkpoints of all slots."""

    def __init__(self, slots: int, entries: int, page_size: int, rows: int, spacing: int = SPACING) -> None:
        """`entries`: number of checkpoints, at least two per slot. `rows`: rows of a tail. `spacing`: see `SPACING`."""
        assert entries >= 2 * slots
        self.pool, self.rows = PagePool(entries), rows
        self._page_size, self._spacing = page_size, spacing
        self._kept: list[list[Checkpoint]] = [[] for _ in range(slots)]

    def reach(self, slot: int, length: int) -> int:
        """Return the largest number of positions, at most `length`, after which a sequence can continue."""
        return next((min(length, each.end) for each in reversed(self._kept[slot]) if each.position <= length), 0)

    def entry(self, slot: int, position: int) -> int:
        """Return the entry of a sequence's checkpoint after exactly this many positions, which must exist."""
        return next(each.entry for each in self._kept[slot] if each.position == position)

    def truncate(self, slot: int, base_length: int) -> None:
        """Drop the checkpoints after this many positions; all of them for 0, because a new sequence begins."""
        kept = self._kept[slot]
        while kept and (kept[-1].position > base_length or base_length == 0):
            self.pool.drop([kept.pop().entry])

    def shared_pages(self, digests: Sequence[bytes]) -> int:
        """Return how many of these leading pages end at a cached checkpoint. `digests`: of pages from the first on."""
        return next((count for count in range(len(digests), 0, -1) if self.pool.has(digests[count - 1])), 0)

    def reusable_length(self, slot: int, num_cached_tokens: int) -> int:
        """Return the position of a sequence's last anchor in its valid positions; 0 if there is none."""
        anchors = (each.position for each in self._kept[slot] if each.is_anchor and each.position <= num_cached_tokens)
        return max(anchors, default=0)

    def share(self, slot: int, position: int, digest: bytes) -> None:
        """Let a sequence begin with the cached checkpoint after this many positions. `digest`: of the page before."""
        (entry,) = self.pool.share([digest])
        self.truncate(slot, 0)
        self._kept[slot].append(Checkpoint(position, entry, 2 * slot, position, is_anchor=True))

    def cache(self, slot: int, digests: Sequence[bytes], known: Container[bytes] = ()) -> None:
        """Add a sequence's anchors to the prefix cache. `digests`: of its valid full pages, from the first on.

        `known`: digests of pages that other sequences have cached. A prompt chunk that ends with such a page leaves an
        anchor, because further sequences may begin with the same tokens.
        """
        for each in self._kept[slot]:
            count, rest = divmod(each.position, self._page_size)
            if rest or not 0 < count <= len(digests):
                continue
            each.is_anchor |= each.is_prompt and digests[count - 1] in known
            if each.is_anchor:
                self.pool.cache(each.entry, digests[count - 1])

    def segment(self, span: Span, first_row: int) -> Segment:
        """Plan the recurrence of a span, and take a checkpoint for it. `first_row`: its first row in the packed batch.

        The sequence can then continue after the committed tokens, or after any tentative ones that fit in a tail. A
        span may start where nothing was cached only in measurements, whose logits do not matter.
        """
        kept, start, end = self._kept[span.slot], span.start, span.end
        begun = next((each for each in reversed(kept) if each.position <= start <= each.end), None)
        border = self._border(span)
        # A prompt chunk after the last border keeps the checkpoint there for the prefix cache.
        is_tail = end - span.num_tentative == start or (not span.num_logits and begun and begun.position == border)
        if begun is not None and is_tail and end - begun.position <= self.rows:
            begun.end = end
            return Segment(first_row, end - start, start, *_place(begun), NONE, 0, begun.tail)
        self.pool.drop([each.entry for each in kept if each is not begun])
        new = self._next(span, begun)
        if begun is not None:
            begun.end = start
        kept[:] = [new] if begun is None else [begun, new]
        read = (NONE, start, new.tail) if begun is None else _place(begun)
        return Segment(first_row, end - start, start, *read, new.entry, new.position, new.tail)

    def undo(self, slot: int, segment: Segment) -> None:
        """Drop the checkpoint that a segment was to write, because its rows did not run."""
        if segment.write != NONE:
            self.pool.drop([self._kept[slot].pop().entry])

    def _next(self, span: Span, begun: Checkpoint | None) -> Checkpoint:
        """Take a checkpoint for a span: at a page border if its tail then holds the rest, for the prefix cache."""
        start, end = span.start, span.end
        committed = end - span.num_tentative
        border, before = self._border(span), 0 if begun is None else begun.position
        at_border = start < border and end - border <= self.rows
        position = border if at_border else max(committed, end - self.rows)
        was_prompt = begun is None or begun.is_prompt
        ends_prompt = was_prompt and span.num_logits > 0
        if begun is not None and ends_prompt and 0 < before == border:
            begun.is_anchor = True
        return Checkpoint(
            position,
            self.pool.take(),
            2 * span.slot + (begun is not None and begun.tail == 2 * span.slot),
            end,
            is_prompt=was_prompt and not ends_prompt,
            is_anchor=at_border and (ends_prompt or position // self._spacing > before // self._spacing),
        )

    def _border(self, span: Span) -> int:
        """Return the last page border at which a sequence with the same committed tokens can begin.

        Such a sequence always runs the last token of its prompt.
        """
        return (span.end - span.num_tentative - bool(span.num_logits)) // self._page_size * self._page_size

    def clear(self) -> None:
        """Drop all checkpoints."""
        for slot in range(len(self._kept)):
            self.truncate(slot, 0)
        self.pool.clear()

    def check_integrity(self) -> None:
        """Raise AssertionError if a checkpoint is lost or miscounted, or two of a sequence share a tail."""
        self.pool.check_integrity([[each.entry for each in kept] for kept in self._kept])
        for kept in self._kept:
            assert len(kept) <= 2, "a sequence has too many checkpoints"
            assert len({each.tail for each in kept}) == len(kept), "two checkpoints share a tail"
            assert all(each.position <= each.end <= each.position + self.rows for each in kept), "a tail is too long"


def _place(checkpoint: Checkpoint) -> tuple[int, int, int]:
    return checkpoint.entry, checkpoint.position, checkpoint.tail
