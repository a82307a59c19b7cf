"""Which earlier sequence begins as a new one does, so that the workers need not work off the same tokens twice. Pure.

What a released sequence has cached stays in a worker until its slot is needed, so finished sequences count too: as many
of the last ones as there are slots that nobody holds.
"""

from collections import OrderedDict
from collections.abc import Iterator
from collections.abc import Sequence as Items

from coordinator.sequence import Prefix, Sequence

# Prompts that share less are worked off side by side, which is sooner than one after the other.
BLOCK_TOKENS = 16


class PrefixIndex:
    """Finds the longest shared prefix in a time that grows with its length, however many sequences are known."""

    def __init__(self) -> None:
        self._by_block: dict[int, dict[int, Sequence]] = {}
        self._blocks: dict[int, list[int]] = {}
        self._finished: OrderedDict[int, Sequence] = OrderedDict()
        """The least recently used first, as in the workers."""

    def add(self, sequence: Sequence) -> None:
        """From now on, others may begin as this sequence does."""
        blocks = list(_blocks(sequence.token_ids))
        for block in blocks[len(self._blocks.get(sequence.sequence_id, ())) :]:
            self._by_block.setdefault(block, {})[sequence.sequence_id] = sequence
        self._blocks[sequence.sequence_id] = blocks

    def finish(self, sequence: Sequence) -> None:
        """The sequence was generated, or given up, and its slots are being released."""
        self.add(sequence)
        self._finished[sequence.sequence_id] = sequence

    def trim(self, most: int) -> None:
        """Remembers only so many of the finished sequences."""
        while len(self._finished) > max(0, most):
            sequence_id, _ = self._finished.popitem(last=False)
            for block in self._blocks.pop(sequence_id):
                alike = self._by_block[block]
                del alike[sequence_id]
                if not alike:
                    del self._by_block[block]

    def find(self, token_ids: Items[int]) -> Prefix | None:
        """The longest prefix of a prompt that an earlier sequence has, or will soon have, cached. None if it is short.

        At least one token of the prompt is left out of it, for the workers to run.
        """
        wanted = token_ids[:-1]
        alike: dict[int, Sequence] = {}
        for block in _blocks(wanted):
            if block not in self._by_block:
                break
            alike = self._by_block[block]
        if not alike:
            return None
        source = max(alike.values(), key=lambda sequence: _promise(sequence, len(wanted)))
        length = _shared_length(source.token_ids, wanted)
        if length < BLOCK_TOKENS:  # blocks are known by a hash
            return None
        if source.sequence_id in self._finished:
            self._finished.move_to_end(source.sequence_id)
        return Prefix(source, length)


def _blocks(token_ids: Items[int]) -> Iterator[int]:
    """A hash of the tokens up to the end of each whole block."""
    block = 0
    for end in range(BLOCK_TOKENS, len(token_ids) + 1, BLOCK_TOKENS):
        block = hash((block, *token_ids[end - BLOCK_TOKENS : end]))
        yield block


def _promise(sequence: Sequence, wanted: int) -> tuple[int, bool, int]:
    """Orders sources: one that has it rather than one that will, one that surely is in the workers rather than one that
    was, of those that will the first, and of those that were the last."""
    lives = sequence.finish is None
    return min(sequence.target_length, wanted), lives, -sequence.sequence_id if lives else sequence.sequence_id


def _shared_length(one: Items[int], other: Items[int]) -> int:
    pairs = enumerate(zip(one, other, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(one), len(other)))
