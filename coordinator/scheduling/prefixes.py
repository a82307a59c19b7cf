"""Earlier sequences that begin as a new one does, so that the workers need not prefill the same tokens twice. Pure.

The cache of a released sequence stays in a worker until its slot is needed, so finished sequences count too: the last
ones, as many as there are free slots.
"""

from collections import OrderedDict
from collections.abc import Iterator
from collections.abc import Sequence as Items
from itertools import count, islice

from coordinator.scheduling.sequence import Prefix, Sequence

# Prompts that share fewer tokens are prefilled side by side, which is sooner than one after the other.
BLOCK_TOKENS = 16
# Sequences that are looked at, of all that share a block: this number of the first and of the last ones.
FEW = 8


class PrefixIndex:
    """Finds the longest shared prefix in a time that grows with its length, however many sequences are known."""

    def __init__(self) -> None:
        self._by_block: dict[int, dict[int, Sequence]] = {}
        self._blocks: dict[int, list[int]] = {}
        self._entered: dict[int, int] = {}
        """The order in which sequences were added."""
        self._finished: OrderedDict[int, Sequence] = OrderedDict()
        """Finished sequences, the least recently used first, as in the workers."""
        self._count = count()

    def add(self, sequence: Sequence) -> None:
        """Makes the sequence a possible source of others that enter later."""
        self._entered[sequence.sequence_id] = next(self._count)
        self._index(sequence, sequence.token_ids)

    def finish(self, sequence: Sequence) -> None:
        """Limits a sequence that has ended to what is cached of it: others can copy no more."""
        self._forget(sequence.sequence_id)
        self._index(sequence, sequence.token_ids[: sequence.target_length])
        if self._blocks[sequence.sequence_id]:
            self._finished[sequence.sequence_id] = sequence
        else:
            self._forget(sequence.sequence_id)

    def trim(self, most: int) -> None:
        """Forgets all finished sequences but the `most` last used."""
        while len(self._finished) > max(0, most):
            self._forget(self._finished.popitem(last=False)[0])

    def _index(self, sequence: Sequence, token_ids: Items[int]) -> None:
        blocks = self._blocks[sequence.sequence_id] = list(_blocks(token_ids))
        for block in blocks:
            self._by_block.setdefault(block, {})[sequence.sequence_id] = sequence

    def _forget(self, sequence_id: int) -> None:
        self._entered.pop(sequence_id, None)
        for block in self._blocks.pop(sequence_id, ()):
            alike = self._by_block.get(block, {})
            alike.pop(sequence_id, None)
            if not alike:
                self._by_block.pop(block, None)

    def find(self, sequence: Sequence) -> Prefix | None:
        """The longest prefix, in blocks, that an earlier sequence has cached or will soon have; None if there is none.

        It leaves out at least the last token of the prompt, for the workers to run.
        """
        wanted = sequence.token_ids[:-1]
        sources: list[Sequence] = []
        for block in _blocks(wanted):
            alike = self._by_block.get(block, {})
            few = (*islice(alike.values(), FEW), *islice(reversed(alike.values()), FEW))
            earlier = [other for other in few if self._is_earlier(other, sequence)]
            if not earlier:
                break
            sources = earlier
        if not sources:
            return None
        source = max(sources, key=lambda other: _promise(other, len(wanted)))
        length = _shared_length(source.token_ids, wanted)
        if length < BLOCK_TOKENS:  # blocks are known by a hash
            return None
        if source.sequence_id in self._finished:
            self._finished.move_to_end(source.sequence_id)
        return Prefix(source, length)

    def _is_earlier(self, one: Sequence, other: Sequence) -> bool:
        """Whether `one` can be a source of `other`: else two could wait for each other, or one for itself."""
        entered = self._entered.get(other.sequence_id)
        return one.finish is not None or entered is None or self._entered[one.sequence_id] < entered


def _blocks(token_ids: Items[int]) -> Iterator[int]:
    """Hashes of the tokens up to the end of each whole block."""
    block = 0
    for end in range(BLOCK_TOKENS, len(token_ids) + 1, BLOCK_TOKENS):
        block = hash((block, *token_ids[end - BLOCK_TOKENS : end]))
        yield block


def _promise(sequence: Sequence, wanted: int) -> tuple[int, bool, int]:
    """Sort key of sources: first by the tokens cached already, then unfinished sequences, which are surely still in the
    workers, before finished ones; of unfinished ones the earliest is best, of finished ones the latest."""
    lives = sequence.finish is None
    return min(sequence.target_length, wanted), lives, -sequence.sequence_id if lives else sequence.sequence_id


def _shared_length(one: Items[int], other: Items[int]) -> int:
    pairs = enumerate(zip(one, other, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(one), len(other)))
