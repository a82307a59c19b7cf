"""Pages of the KV cache: which are free, which sequences hold, and which the prefix cache keeps.

A sequence takes a page when it grows, and returns its pages when it ends. Sequences with a common prefix share its full
pages, so pages have reference counts. The prefix cache finds them by digest. It keeps a page that no sequence holds
until the memory is needed. Nothing is ever copied or moved. Pure bookkeeping, without torch.
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence

from specpool.engine.numerics.tiles import round_up


class PagePool:
    """All pages, with their reference counts and the prefix cache."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.on_evict: Callable[[bytes], None] = lambda digest: None
        """Called with the digest of each page that leaves the prefix cache for lack of memory."""
        self._unused = list(range(count - 1, -1, -1))
        """Pages without valid tokens. The last one is next: pages that were used lately are in memory already."""
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
        """Return a page without valid tokens for a sequence. Requires a free page."""
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
        """Return the longest run of cached pages with these digests, for a sequence that now holds them too."""
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
        """Take back the pages of a sequence. Cached ones stay in the prefix cache, the last ones for the least time."""
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
        """Let other sequences share a full page, unless they already share an equal one."""
        if digest not in self._cached and page not in self._digests:
            self._cached[digest], self._digests[page] = page, digest

    def uncache(self, page: int) -> bool:
        """Take a page out of the prefix cache, to overwrite it. Return False if other sequences hold it."""
        if page not in self._digests:
            return True
        if self._references[page] > 1:
            return False
        del self._cached[self._digests.pop(page)]
        return True

    def digest_of(self, page: int) -> bytes | None:
        """The digest of a page in the prefix cache."""
        return self._digests.get(page)

    def clear(self) -> None:
        """Empty the prefix cache of pages that no sequence holds."""
        for page in self._idle:
            del self._cached[self._digests.pop(page)]
            self._unused.append(page)
        self._idle.clear()

    def check_integrity(self, held: Sequence[Sequence[int]]) -> None:
        """Raise AssertionError if a page is lost, in two states, or miscounted. `held`: the pages of each sequence."""
        counts: dict[int, int] = {}
        for page in (page for pages in held for page in pages):
            counts[page] = counts.get(page, 0) + 1
        assert counts == self._references, "references to pages are miscounted"
        states = [*self._unused, *self._idle, *self._references]
        assert sorted(states) == list(range(self.count)), "a page is lost or in two states"
        assert {page: digest for digest, page in self._cached.items()} == self._digests, "digests differ from pages"
        assert all(page in self._digests for page in self._idle), "an idle page is not cached"
        assert not self._digests.keys() & set(self._unused), "a cached page is unused"


class PageTables:
    """The pages of each slot, in the order of its logical columns."""

    def __init__(self, slots: int, max_length: int, columns: int, page_size: int) -> None:
        """`max_length`: columns of the longest sequence. `columns`: columns of the cache; both in whole pages."""
        assert max_length % page_size == columns % page_size == 0
        self.page_size, self.max_length = page_size, max_length
        self.pool = PagePool(columns // page_size)
        self.held: list[list[int]] = [[] for _ in range(slots)]
        self.assign: Callable[[int, int, Sequence[int]], None] = lambda slot, first, pages: None
        """Called with a slot, the number of an entry of its table, and the pages from that entry on."""

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
        return max(0, round_up(columns, self.page_size) // self.page_size - len(self.held[slot]))

    def grow(self, slot: int, columns: int) -> bool:
        """Give a slot pages for this many columns. Return False, and give none, if too few are free."""
        missing, held = self.missing(slot, columns), self.held[slot]
        if missing > self.pool.free:
            return False
        if missing:
            self.add(slot, [self.pool.take() for _ in range(missing)])
        assert len(held) * self.page_size <= self.max_length, "a sequence is longer than its table"
        return True

    def add(self, slot: int, pages: Sequence[int]) -> None:
        """Append pages to the table of a slot, which holds them from now on."""
        if pages:
            self.assign(slot, len(self.held[slot]), pages)
            self.held[slot] += pages

    def truncate(self, slot: int, columns: int) -> None:
        """Take back the pages after the one that holds the last of this many columns."""
        count, held = round_up(columns, self.page_size) // self.page_size, self.held[slot]
        if count < len(held):
            self.pool.drop(held[count:])
            del held[count:]

    def check_integrity(self) -> None:
        """Raise AssertionError if a page is lost or miscounted."""
        self.pool.check_integrity(self.held)
