"""Index of cached prefixes: finds an earlier sequence that begins like a new one. Pure.

A worker keeps the cache of a released sequence until it needs the slot. The index therefore also keeps the most
recently used finished sequences, one for each free slot.

Sharing is observable, in `usage.cached_tokens` and in response times. Sequences therefore share only within their
namespace, and only whole blocks. Otherwise a prompt could be guessed token by token.
"""

from collections import OrderedDict
from dataclasses import dataclass
from itertools import count, islice, takewhile

from coordinator.scheduling.sequence import Prefix, Sequence
from specpool.drafting.prefix_digests import BLOCK_TOKENS, Digest

# Candidates to examine per digest: this many of the earliest, and as many of the latest.
MAX_CANDIDATES = 8


@dataclass
class _Entry:
    sequence: Sequence
    entered: int
    digests: list[Digest]


class PrefixIndex:
    """Finds the longest shared prefix in time proportional to its length, however many sequences there are."""

    def __init__(self) -> None:
        self._by_digest: dict[tuple[str, str], dict[Digest, dict[int, Sequence]]] = {}
        """By namespace."""
        self._entries: dict[int, _Entry] = {}
        self._finished: OrderedDict[int, Sequence] = OrderedDict()
        """Least recently used first, as in the workers."""
        self._count = count()

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, sequence: Sequence) -> None:
        """Add a source for sequences that enter later."""
        self.discard(sequence)
        self._finished.pop(sequence.sequence_id, None)
        self._index(sequence, len(sequence.token_ids))

    def finish(self, sequence: Sequence) -> None:
        """Limit a finished or preempted sequence to its cached tokens."""
        self.discard(sequence)
        if sequence.target.num_cached_tokens >= BLOCK_TOKENS:
            self._index(sequence, sequence.target.num_cached_tokens)
            self._finished[sequence.sequence_id] = sequence

    def trim(self, limit: int) -> None:
        """Drop all finished sequences but the `limit` most recently used."""
        while len(self._finished) > max(0, limit):
            self.discard(self._finished.popitem(last=False)[1])

    def discard(self, sequence: Sequence) -> None:
        entry = self._entries.pop(sequence.sequence_id, None)
        if entry is None:
            return
        namespace = sequence.request.namespace
        sequences = self._by_digest.get(namespace, {})
        for digest in entry.digests:
            del sequences[digest][sequence.sequence_id]
            if not sequences[digest]:
                del sequences[digest]
        if not sequences:
            self._by_digest.pop(namespace, None)

    def _index(self, sequence: Sequence, length: int) -> None:
        digests = [digest for _, digest in sequence.digests.up_to(sequence.token_ids, length)]
        self._entries[sequence.sequence_id] = _Entry(sequence, next(self._count), digests)
        sequences = self._by_digest.setdefault(sequence.request.namespace, {})
        for digest in digests:
            sequences.setdefault(digest, {})[sequence.sequence_id] = sequence

    def matched_length(self, sequence: Sequence) -> int:
        """Tokens that a sequence shares with one that is or will be cached, in whole blocks."""
        by_digest = self._by_digest.get(sequence.request.namespace, {})
        digests = sequence.digests.up_to(sequence.token_ids, len(sequence.token_ids) - 1) if by_digest else ()
        return max((length for length, _ in takewhile(lambda each: each[1] in by_digest, digests)), default=0)

    def find(self, sequence: Sequence) -> Prefix | None:
        """The longest prefix that an earlier sequence has cached or will cache soon.

        It consists of whole blocks, unless the source is another sample of the same request. It never includes the last
        token of the prompt, which the workers must run.
        """
        by_digest = self._by_digest.get(sequence.request.namespace, {})
        sources: list[Sequence] = []
        matched = 0
        digests = sequence.digests.up_to(sequence.token_ids, len(sequence.token_ids) - 1) if by_digest else ()
        for length, digest in digests:
            same = by_digest.get(digest, {})
            candidates = (*islice(same.values(), MAX_CANDIDATES), *islice(reversed(same.values()), MAX_CANDIDATES))
            earlier = [other for other in candidates if self._is_earlier(other, sequence)]
            if not earlier:
                break
            sources, matched = earlier, length
        if not sources:
            return None
        shared = {other.sequence_id: (_shared_length(other, sequence, matched), other) for other in sources}
        length, source = max(shared.values(), key=lambda candidate: _preference(*candidate))
        if source.sequence_id in self._finished:
            self._finished.move_to_end(source.sequence_id)
        return Prefix(source, length)

    def _is_earlier(self, source: Sequence, sequence: Sequence) -> bool:
        """Whether `source` finished or entered first. Otherwise sequences could wait for each other or themselves."""
        entry = self._entries.get(sequence.sequence_id)
        return source.finish is not None or entry is None or self._entries[source.sequence_id].entered < entry.entered


def _shared_length(source: Sequence, sequence: Sequence, matched: int) -> int:
    """Length of the shared prefix, whose first `matched` tokens are known to be equal."""
    one, other = source.token_ids, sequence.token_ids
    end = min(len(one) if source.finish is None else source.target.num_cached_tokens, len(other) - 1)
    if source.first_sample_id == sequence.first_sample_id and source.sequence_id != sequence.sequence_id:
        # Beyond the prompt, samples differ.
        return min(end, sequence.prompt_length)
    length = matched
    while (after := length + BLOCK_TOKENS) <= end and one[length:after] == other[length:after]:
        length = after
    return length


def _preference(shared: int, source: Sequence) -> tuple[int, int, bool, int]:
    """Sort key: shared tokens already cached, then shared tokens, then unfinished before finished sources.

    Unfinished sources are certainly still cached. The earliest unfinished source wins, or the latest finished one.
    """
    is_running = source.finish is None
    return (
        min(source.target.num_cached_tokens, shared),
        shared,
        is_running,
        -source.sequence_id if is_running else source.sequence_id,
    )
