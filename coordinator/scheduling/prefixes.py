"""Earlier sequences that begin as a new one does, so that the workers need not prefill the same tokens twice. Pure.

The cache of a released sequence stays in a worker until its slot is needed, so finished sequences count too: as many of
the last ones as there are free slots.

Sharing can be observed, in `usage.cached_tokens` and in response times. So sequences share only within their namespace,
and only whole blocks: with prefixes that are exact to the token, a guess could be confirmed token by token.
"""

from array import array
from collections import OrderedDict
from collections.abc import Iterator
from collections.abc import Sequence as Items
from dataclasses import dataclass
from hashlib import sha256
from itertools import count, islice

from coordinator.scheduling.sequence import Prefix, Sequence

# Prompts that share fewer tokens are prefilled side by side, which is sooner than one after the other.
BLOCK_TOKENS = 16
# Of all sequences that share a mark, this number of the first and this number of the last are looked at.
FEW = 8
# From one mark to the next the length grows by one part in this number, in whole blocks: long prompts have few marks
# too.
STRIDE = 32

Mark = bytes
"""A digest of all tokens up to some length: different tokens never have the same one, by accident or on purpose."""


@dataclass
class _Known:
    """A sequence with which others may share a prefix."""

    sequence: Sequence
    entered: int
    marks: list[Mark]


class PrefixIndex:
    """Finds the longest shared prefix in a time that grows with its length, however many sequences are known."""

    def __init__(self) -> None:
        self._by_mark: dict[tuple[str, str], dict[Mark, dict[int, Sequence]]] = {}
        """By namespace."""
        self._known: dict[int, _Known] = {}
        self._finished: OrderedDict[int, Sequence] = OrderedDict()
        """Finished sequences, the least recently used first, as in the workers."""
        self._count = count()

    def __len__(self) -> int:
        return len(self._known)

    def add(self, sequence: Sequence) -> None:
        """Makes the sequence a possible source of others that enter later."""
        self._index(sequence, sequence.token_ids)

    def finish(self, sequence: Sequence) -> None:
        """Limits a sequence that has ended to what is cached of it: others can copy no more."""
        self._forget(sequence.sequence_id)
        if sequence.num_cached_tokens >= BLOCK_TOKENS:
            self._index(sequence, sequence.token_ids[: sequence.num_cached_tokens])
            self._finished[sequence.sequence_id] = sequence

    def discard(self, sequence: Sequence) -> None:
        """Forgets a sequence that is no source any more."""
        self._forget(sequence.sequence_id)

    def trim(self, most: int) -> None:
        """Forgets all finished sequences but the `most` last used."""
        while len(self._finished) > max(0, most):
            self._forget(self._finished.popitem(last=False)[0])

    def _index(self, sequence: Sequence, token_ids: Items[int]) -> None:
        marks = [mark for _, mark in _marks(token_ids)]
        self._known[sequence.sequence_id] = _Known(sequence, next(self._count), marks)
        own = self._by_mark.setdefault(sequence.request.namespace, {})
        for mark in marks:
            own.setdefault(mark, {})[sequence.sequence_id] = sequence

    def _forget(self, sequence_id: int) -> None:
        known = self._known.pop(sequence_id, None)
        if known is None:
            return
        namespace = known.sequence.request.namespace
        own = self._by_mark.get(namespace, {})
        for mark in known.marks:
            del own[mark][sequence_id]
            if not own[mark]:
                del own[mark]
        if not own:
            self._by_mark.pop(namespace, None)

    def find(self, sequence: Sequence) -> Prefix | None:
        """The longest prefix that an earlier sequence has cached or will soon have; None if there is none.

        It consists of whole blocks, unless it comes from another sample of the same request. It leaves out at least the
        last token of the prompt, for the workers to run.
        """
        wanted, own = sequence.token_ids[:-1], self._by_mark.get(sequence.request.namespace, {})
        sources: list[Sequence] = []
        marked = 0
        for length, mark in _marks(wanted) if own else ():
            alike = own.get(mark, {})
            few = (*islice(alike.values(), FEW), *islice(reversed(alike.values()), FEW))
            earlier = [other for other in few if self._is_earlier(other, sequence)]
            if not earlier:
                break
            sources, marked = earlier, length
        if not sources:
            return None
        shared = {other.sequence_id: (_shared(other, sequence, marked), other) for other in sources}
        length, source = max(shared.values(), key=lambda found: _promise(*found))
        if source.sequence_id in self._finished:
            self._finished.move_to_end(source.sequence_id)
        return Prefix(source, length)

    def _is_earlier(self, one: Sequence, other: Sequence) -> bool:
        """Whether `one` can be a source of `other`: else two could wait for each other, or one for itself."""
        known = self._known.get(other.sequence_id)
        return one.finish is not None or known is None or self._known[one.sequence_id].entered < known.entered


def _marks(token_ids: Items[int]) -> Iterator[tuple[int, Mark]]:
    """Lengths in whole blocks, each with the mark of the tokens up to there."""
    digest, begin = sha256(), 0
    while (end := begin + max(1, begin // STRIDE // BLOCK_TOKENS) * BLOCK_TOKENS) <= len(token_ids):
        digest.update(array("I", token_ids[begin:end]))
        yield end, digest.digest()
        begin = end


def _shared(source: Sequence, sequence: Sequence, marked: int) -> int:
    """The number of tokens at the beginning that a sequence shares with the source, given the same mark at `marked`."""
    one, other = source.token_ids, sequence.token_ids
    end = min(len(one) if source.finish is None else source.num_cached_tokens, len(other) - 1)
    if source.first_sample_id == sequence.first_sample_id:  # what a sample that was set aside has generated is its own
        return min(end, sequence.prompt_length)
    length = marked
    while (after := length + BLOCK_TOKENS) <= end and one[length:after] == other[length:after]:
        length = after
    return length


def _promise(shared: int, source: Sequence) -> tuple[int, int, bool, int]:
    """Sort key of sources: first by the shared tokens that are cached already, then by all of them, then unfinished
    sequences, which are surely still in the workers, before finished ones; of unfinished ones the earliest is best, of
    finished ones the latest."""
    lives = source.finish is None
    return min(source.num_cached_tokens, shared), shared, lives, -source.sequence_id if lives else source.sequence_id
