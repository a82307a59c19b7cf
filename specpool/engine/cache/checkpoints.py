"""Checkpoints of the recurrent states of sequences. Pure bookkeeping, without torch.

A sequence has at most two: the newest one, and the one that its last round began with, so that the round can be
repeated. Rejecting tokens never changes a checkpoint: the next round computes the accepted rows again, from the newest
checkpoint at or before its base. The prefix cache keeps checkpoints at page borders, by the digest of the page before.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from specpool.engine.cache.pages import PagePool
from specpool.engine.cache.spans import Span

SPACING = 1024
"""Minimum positions between checkpoints that the prefix cache keeps of a sequence, except at the end of its prompt."""
NONE = -1


class Segment(NamedTuple):
    """How a pass runs the recurrence of one span.

    Begin with the state of checkpoint `read`, run the tail rows from `read_position` to `start` again, then new rows.
    Write the state before the row at `write_position`, or after the last row if that is the end, to checkpoint `write`.
    """

    first_row: int  # in the packed batch
    num_rows: int
    start: int  # position of the first row
    read: int  # NONE: zeros, without inputs before
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
    digest: bytes | None = None
    ends_prompt: bool = False


class Checkpoints:
    """The checkpoints of all slots."""

    def __init__(self, slots: int, entries: int, page_size: int, rows: int) -> None:
        """`entries`: number of checkpoints, at least two per slot. `page_size`: of the prefix cache; 0: there is none.

        `rows`: rows of a tail.
        """
        assert entries >= 2 * slots
        self.pool, self._page_size, self._rows = PagePool(entries), page_size, rows
        self._kept: list[list[Checkpoint]] = [[] for _ in range(slots)]

    def holds(self, slot: int, base_length: int) -> bool:
        """Whether a sequence can continue after this many positions."""
        return base_length == 0 or self._at(slot, base_length) is not None

    def truncate(self, slot: int, base_length: int) -> None:
        """Drop the checkpoints after this many positions; all of them for 0, because a new sequence begins."""
        kept = self._kept[slot]
        while kept and (kept[-1].position > base_length or base_length == 0):
            self.pool.drop([kept.pop().entry])

    def shared_pages(self, digests: Sequence[bytes]) -> int:
        """Return how many of these leading pages end at a cached checkpoint. `digests`: of pages from the first on."""
        return next((count for count in range(len(digests), 0, -1) if self.pool.has(digests[count - 1])), 0)

    def reusable_length(self, slot: int) -> int:
        """Return the position of a sequence's last checkpoint in the prefix cache; 0 if there is none."""
        return max((each.position for each in self._kept[slot] if each.digest is not None), default=0)

    def share(self, slot: int, digests: Sequence[bytes]) -> None:
        """Let a sequence begin with the checkpoint after these pages, which the prefix cache must have."""
        (entry,) = self.pool.share(digests[-1:])
        self.truncate(slot, 0)
        position = len(digests) * self._page_size
        self._kept[slot].append(Checkpoint(position, entry, 2 * slot, position, digests[-1]))

    def cache(self, slot: int, num_cached_tokens: int, digests: Sequence[bytes]) -> None:
        """Add a sequence's checkpoints at page borders to the prefix cache. `digests`: of its pages, from the first."""
        last = 0
        for each in self._kept[slot]:
            count, rest = divmod(each.position, self._page_size or 1)
            if not self._page_size or rest or not count or each.position > num_cached_tokens or count > len(digests):
                continue
            if each.digest is None and (each.ends_prompt or each.position - last >= SPACING):
                each.digest = digests[count - 1]
                self.pool.cache(each.entry, each.digest)
            last = each.position if each.digest is not None else last

    def segment(self, span: Span, first_row: int) -> Segment:
        """Plan the recurrence of a span, and take a checkpoint for it. `first_row`: its first row in the packed batch.

        A span may start where nothing was cached only in measurements, whose logits do not matter.
        """
        kept, start, end = self._kept[span.slot], span.start, span.end
        begun = self._at(span.slot, start)
        committed = end - span.num_tentative
        if begun is not None and committed <= start:
            assert end - begun.position <= self._rows, "a draft is longer than a tail"
            begun.end = end
            return Segment(first_row, end - start, start, *_place(begun), NONE, 0, begun.tail)
        border = committed - committed % self._page_size if self._page_size else committed
        at = border if start < border and end - border <= self._rows else committed
        assert end - at <= self._rows, "a draft is longer than a tail"
        self.pool.drop([each.entry for each in kept if each is not begun])
        tail = 2 * span.slot + (begun is not None and begun.tail == 2 * span.slot)
        is_prompt = committed - start > self._page_size > 0
        new = Checkpoint(at, self.pool.take(), tail, end, ends_prompt=is_prompt and span.num_logits > 0)
        if begun is not None:
            begun.end = start
        kept[:] = [new] if begun is None else [begun, new]
        read = (NONE, start, tail) if begun is None else _place(begun)
        return Segment(first_row, end - start, start, *read, new.entry, at, tail)

    def _at(self, slot: int, base_length: int) -> Checkpoint | None:
        """The newest checkpoint from which the state after this many positions can be computed."""
        reaching = (each for each in reversed(self._kept[slot]) if each.position <= base_length <= each.end)
        return next(reaching, None)

    def clear(self) -> None:
        """Drop all checkpoints."""
        for slot in range(len(self._kept)):
            self.truncate(slot, 0)
        self.pool.clear()

    def check_integrity(self) -> None:
        """Raise AssertionError if a checkpoint is lost or miscounted."""
        self.pool.check_integrity([[each.entry for each in kept] for kept in self._kept])


def _place(checkpoint: Checkpoint) -> tuple[int, int, int]:
    return checkpoint.entry, checkpoint.position, checkpoint.tail
