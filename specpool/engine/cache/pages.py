"""Pages of the KV cache: free, held by sequences, or kept by the prefix cache.

A sequence takes pages as it grows and returns them when it ends. Sequences with a common prefix share its full pages,
which have reference counts. The prefix cache finds pages by digest, and keeps those that no sequence holds until the
memory is needed. Nothing is copied or moved. Pure bookkeeping, without torch.
"""

from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from itertools import chain


class PagePool:
    """All pages, with their reference counts and the prefix cache."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.on_evict: Callable[[bytes], None] = lambda digest: None
        """Called with the digest of each page that the prefix cache evicts to free memory."""
        self._unused = list(range(count - 1, -1, -1))
        """Pages without valid tokens, taken from the end: recently used pages are already in memory."""
        self._references: dict[int, int] = {}
        self._digests: dict[int, bytes] = {}
        self._cached: dict[bytes, int] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()
        """Pages in the prefix cache that no sequence holds, least recently used first."""

    @property
    def free(self) -> int:
        """Number of pages that no sequence holds."""
        return len(self._unused) + len(self._idle)

    def take(self) -> int:
        """Give a sequence a page without valid tokens. Requires a free page."""
        if self._unused:
            page = self._unused.pop()
        else:
            page = self._idle.popitem(last=False)[0]
            digest = self._digests.pop(page)
            del self._cached[digest]
            self.on_evict(digest)
        self._references[page] = 1
        return page

    def share(self, digests: Sequence[bytes]) -> list[int]:
        """Give a sequence the leading pages with these digests, up to the first that is not cached. Return them."""
        pages = list[int]()
        for digest in digests:
            page = self._cached.get(digest)
            if page is None:
                break
            self._references[page] = self._references.get(page, 0) + 1
            self._idle.pop(page, None)
            pages.append(page)
        return pages

    def drop(self, pages: Sequence[int]) -> None:
        """Take back pages from a sequence. Cached pages stay in the prefix cache; later pages are evicted first."""
        for page in reversed(pages):
            self._references[page] -= 1
            if self._references[page]:
                continue
            del self._references[page]
            if page in self._digests:
                self._idle[page] = None
            else:
                self._unused.append(page)

    def cache(self, page: int, digest: bytes) -> None:
        """Add a full page to the prefix cache, unless an equal page is already there."""
        if digest not in self._cached and page not in self._digests:
            self._cached[digest], self._digests[page] = page, digest

    def uncache(self, page: int) -> bool:
        """Remove a page from the prefix cache before it is overwritten. Return False if other sequences hold it."""
        if page not in self._digests:
            return True
        if self._references[page] > 1:
            return False
        del self._cached[self._digests.pop(page)]
        return True

    def has(self, digest: bytes) -> bool:
        """Whether the prefix cache has a page with this digest."""
        return digest in self._cached

    def references(self, page: int) -> int:
        """Number of sequences that hold a page."""
        return self._references.get(page, 0)

    def digest_of(self, page: int) -> bytes | None:
        """Return the digest of a page; None if it is not in the prefix cache."""
        return self._digests.get(page)

    def clear(self) -> None:
        """Drop all pages that no sequence holds from the prefix cache."""
        for page in self._idle:
            del self._cached[self._digests.pop(page)]
            self._unused.append(page)
        self._idle.clear()

    def check_integrity(self, held: Sequence[Sequence[int]]) -> None:
        """Raise AssertionError if a page is lost, in two states, or miscounted. `held`: the pages of each sequence."""
        assert Counter(chain.from_iterable(held)) == self._references, "references to pages are miscounted"
        states = [*self._unused, *self._idle, *self._references]
        assert sorted(states) == list(range(self.count)), "a page is lost or in two states"
        assert {page: digest for digest, page in self._cached.items()} == self._digests, "digests differ from pages"
        assert all(page in self._digests for page in self._idle), "an idle page is not cached"
        assert not self._digests.keys() & set(self._unused), "a cached page is unused"


class PageTables:
    """The pages of each slot, in the order of its logical columns."""

    def __init__(self, slots: int, max_length: int, columns: int, page_size: int) -> None:
        """`max_length`: columns of the longest sequence. `columns`: columns of the cache. Both in whole pages."""
        assert max_length % page_size == columns % page_size == 0
        self.page_size, self.max_length = page_size, max_length
        self.pool = PagePool(columns // page_size)
        self.held: list[list[int]] = [[] for _ in range(slots)]
        self._freed = [0] * slots
        """Leading pages that each slot has given back. Their table entries are stale, but still name pages."""
        self.assign: Callable[[int, int, Sequence[int]], None] = lambda slot, first, pages: None
        """Called with a slot, an entry of its table, and the pages to write from that entry on."""

    @property
    def columns(self) -> int:
        """Columns of the cache."""
        return self.pool.count * self.page_size

    @property
    def free(self) -> int:
        """Columns in pages that no sequence holds."""
        return self.pool.free * self.page_size

    def missing(self, slot: int, columns: int) -> int:
        """Number of pages that a slot lacks for this many columns."""
        return max(0, self._pages_for(columns) - self._entries(slot))

    def fits(self, slot: int, columns: int) -> bool:
        """Return whether a slot's table ends with the page of the last of this many columns."""
        return self._entries(slot) == self._pages_for(columns)

    def capacity(self, slot: int) -> int:
        """Columns up to the end of a slot's last page."""
        return self._entries(slot) * self.page_size

    def first(self, slot: int) -> int:
        """First column of a slot that has not been freed."""
        return self._freed[slot] * self.page_size

    def pages(self, slot: int, first: int, end: int) -> list[int]:
        """Return the pages in entries `first` to `end` - 1 of a slot's table, none of which may have been freed."""
        freed = self._freed[slot]
        assert first >= freed, "reading a freed page"
        return self.held[slot][first - freed : end - freed]

    def _entries(self, slot: int) -> int:
        """Length of a slot's table, including entries of freed pages."""
        return self._freed[slot] + len(self.held[slot])

    def _pages_for(self, columns: int) -> int:
        """Number of pages that hold this many columns."""
        return -(-columns // self.page_size)

    def held_by(self, slots: Sequence[int]) -> int:
        """Number of pages that these slots hold and no others."""
        held = Counter(page for slot in slots for page in self.held[slot])
        return sum(self.pool.references(page) == count for page, count in held.items())

    def grow(self, slot: int, columns: int) -> bool:
        """Give a slot pages for this many columns. Return False and change nothing if too few are free."""
        missing = self.missing(slot, columns)
        if missing > self.pool.free:
            return False
        if missing:
            self.add(slot, [self.pool.take() for _ in range(missing)])
        assert self.capacity(slot) <= self.max_length, "a sequence is longer than its table"
        return True

    def add(self, slot: int, pages: Sequence[int]) -> None:
        """Append pages to a slot's table."""
        if pages:
            self.assign(slot, self._entries(slot), pages)
            self.held[slot] += pages

    def truncate(self, slot: int, columns: int) -> None:
        """Take back the pages not needed for this many columns."""
        count, held = self._pages_for(columns), self.held[slot]
        if count < self._entries(slot):
            kept = max(0, count - self._freed[slot])
            self.pool.drop(held[kept:])
            del held[kept:]
            self._freed[slot] = min(self._freed[slot], count)

    def free_before(self, slot: int, column: int) -> None:
        """Take back the pages wholly before this column, which the slot no longer reads."""
        held = self.held[slot]
        count = min(column // self.page_size - self._freed[slot], len(held))
        if count > 0:
            self.pool.drop(held[:count])
            del held[:count]
            self._freed[slot] += count

    def check_integrity(self) -> None:
        """Raise AssertionError if a page is lost or miscounted."""
        self.pool.check_integrity(self.held)
