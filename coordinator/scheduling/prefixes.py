"""Mirror of the target's prefix cache: pages that it holds, and pages that sequences are prefilling. Pure.

Verdicts show which pages the target has cached, and responses list the pages that it has evicted. A wrong entry costs
one cache miss.

Sharing is observable, in `usage.cached_tokens` and in response times. Sequences therefore share only within their
namespace, and only whole pages. Otherwise a prompt could be guessed token by token.
"""

from collections.abc import Callable, Iterable
from collections.abc import Sequence as Items
from dataclasses import dataclass
from itertools import takewhile

from coordinator.scheduling.cache_events import CacheEvents
from coordinator.scheduling.sequence import Sequence

DEFAULT_MAX_PAGES = 65_536
"""Maximum number of pages to remember if the target has no limit."""


@dataclass
class _Member:
    """A sequence in the window."""

    awaited: bytes | None
    """Digest of its last page that an earlier sequence is prefilling."""
    num_cached_pages: int = 0


class PrefixIndex:
    """Finds the longest shared prefix in time proportional to its length, however many sequences there are."""

    def __init__(self, page_size: int = 0, max_pages: int = 0, events: CacheEvents | None = None) -> None:
        """`page_size`: tokens per page; 0: nothing is shared. `max_pages`: pages of the target; 0: no limit.

        `events`: receives every change of the cached pages.
        """
        self.page_size, self.max_pages, self._events = page_size, max_pages, events
        self._cached: dict[bytes, None] = {}
        """Digests, oldest first."""
        self._next: dict[bytes, bytes] = {}
        """The page that first followed each page, by digest."""
        self._reusable: set[bytes] | None = None
        """Digests of the cached pages after which the target has kept the states of recurrent layers, so that sequences
        can begin there. None: sequences can begin after every cached page."""
        self._prefilling: dict[bytes, Sequence] = {}
        """The sequence that is prefilling a page, by digest."""
        self._members: dict[int, _Member] = {}

    def __len__(self) -> int:
        return len(self._cached)

    def add(self, sequence: Sequence) -> None:
        """Add a sequence that enters the window. It prefills the pages that are neither cached nor being prefilled."""
        awaited, has_own = None, False
        digests = self._digests(sequence, len(sequence.token_ids))
        reusable = usable = awaitable = (len(sequence.token_ids) - 1) // max(1, self.page_size)
        if self._reusable is not None:  # the states may only be kept at the end of the prompt
            reusable, awaitable = self.cached_length(sequence) // self.page_size, len(digests)
        for number, digest in enumerate(digests):
            if number:
                self._next.setdefault(digests[number - 1], digest)
            if digest in self._cached and (number < reusable or reusable == usable):
                continue
            if not self._is_prefilling(digest) or self._prefilling[digest] is sequence:
                self._prefilling[digest], has_own = sequence, True
            elif number < awaitable and not has_own:  # waiting only for pages before its own rules out cycles
                awaited = digest
        self._members[sequence.sequence_id] = _Member(awaited)

    def waits(self, sequence: Sequence) -> bool:
        """Return whether an earlier sequence is still prefilling pages of this one."""
        awaited = self._members[sequence.sequence_id].awaited
        return awaited is not None and self._is_prefilling(awaited)

    def commit(self, sequence: Sequence) -> None:
        """Record the pages of a sequence that the target has cached."""
        member = self._members.get(sequence.sequence_id)
        if member is None or not self.page_size:
            return
        length = min(sequence.target.num_cached_tokens, len(sequence.token_ids))
        first, member.num_cached_pages = member.num_cached_pages, length // self.page_size
        if first < member.num_cached_pages:
            digests = self._digests(sequence, length)
            for number, digest in enumerate(digests[first:], first):
                self._prefilling.pop(digest, None)
                if digest not in self._cached:
                    self._cached[digest] = None
                    self._publish(sequence, digests, number)
        if sequence.target.reusable_length is not None:
            if self._reusable is None:
                self._reusable = set()
            ends = self._digests(sequence, min(length, sequence.target.reusable_length))[-1:]
            self._reusable.update(self._cached.keys() & ends)
        while len(self) > (self.max_pages or DEFAULT_MAX_PAGES):
            self.evict([next(iter(self._cached))])

    def _publish(self, sequence: Sequence, digests: Items[bytes], number: int) -> None:
        """Publish page `number` of a sequence, given the sequence's digests."""
        if self._events is not None:
            token_ids = sequence.token_ids[number * self.page_size : (number + 1) * self.page_size]
            parent = digests[number - 1] if number else None
            self._events.stored(sequence.request.namespace, parent, digests[number], token_ids)

    def discard(self, sequence: Sequence) -> None:
        """Remove a sequence that leaves the window. Its pages stay in the target's prefix cache."""
        if self._members.pop(sequence.sequence_id, None) is not None:
            for digest in self._digests(sequence, len(sequence.token_ids)):
                if self._prefilling.get(digest) is sequence:
                    del self._prefilling[digest]
                if digest not in self._cached:
                    self._next.pop(digest, None)

    def evict(self, digests: Iterable[bytes]) -> None:
        """Record that the target has evicted these pages, or the states after them, which have the same digests."""
        for digest in digests:
            if self._reusable and digest in self._reusable:  # the page itself may still be cached
                self._reusable.remove(digest)
            elif digest in self._cached:
                del self._cached[digest]
                self._next.pop(digest, None)
                if self._events is not None:
                    self._events.removed(digest)

    def mispredicted(self, sequence: Sequence) -> None:
        """Forget the pages or states predicted for a sequence, because the target lacks some of them."""
        digests = self._digests(sequence, len(sequence.token_ids))
        if self._reusable is None:
            self.evict(digests)
        else:
            self._reusable.difference_update(digests)

    def clear(self) -> None:
        """Forget all cached pages."""
        self._reusable = None
        self.evict(list(self._cached))

    def cached_length(self, sequence: Sequence) -> int:
        """Return how many leading tokens the target should have cached. At least the last token is left to run."""
        if self._reusable is None:
            return self._count(sequence, self._cached.__contains__)
        digests = self._digests(sequence, len(sequence.token_ids) - 1)
        counts = range(len(digests), 0, -1)
        return self.page_size * next((count for count in counts if digests[count - 1] in self._reusable), 0)

    def fork_length(self, sequence: Sequence) -> int:
        """Return after how many leading tokens a sequence departs from the one that cached them; 0 if unknown.

        The target should keep the states there, because further sequences may begin with the same tokens.
        """
        if self._reusable is None:
            return 0
        digests = self._digests(sequence, len(sequence.token_ids))
        length = self._count(sequence, self._cached.__contains__)
        count = length // max(1, self.page_size)
        following = self._next.get(digests[count - 1]) if count else None
        return 0 if following in (None, *digests[count : count + 1]) else length

    def matched_length(self, sequence: Sequence) -> int:
        """Return how many leading tokens the target should have cached now or soon."""
        return self._count(sequence, lambda digest: digest in self._cached or self._is_prefilling(digest))

    def _count(self, sequence: Sequence, holds: Callable[[bytes], bool]) -> int:
        digests = self._digests(sequence, len(sequence.token_ids) - 1)
        return self.page_size * sum(1 for _ in takewhile(holds, digests))

    def _digests(self, sequence: Sequence, length: int) -> list[bytes]:
        return sequence.page_digests(self.page_size, length)

    def _is_prefilling(self, digest: bytes) -> bool:
        """Return whether a running sequence is prefilling a page."""
        sequence = self._prefilling.get(digest)
        return sequence is not None and sequence.finish is None and not sequence.paused

    def check_integrity(self, sequence_ids: set[int]) -> None:
        """Raise AssertionError unless exactly these sequences are members, and only they prefill."""
        assert self._members.keys() == sequence_ids, "the index differs from the window"
        prefilling = {sequence.sequence_id for sequence in self._prefilling.values()}
        assert prefilling <= sequence_ids, "a sequence outside the window is prefilling"
        is_run_again = self._reusable is not None
        assert is_run_again or not self._cached.keys() & self._prefilling.keys(), "a cached page is being prefilled"
        assert self._cached.keys() >= (self._reusable or set()), "a state after a page that is not cached"
        assert len(self) <= (self.max_pages or DEFAULT_MAX_PAGES), "the index is exceeded"
