"""Caches of fake workers: token ids in shared pages, as the protocol defines."""

from collections.abc import Hashable, Sequence
from itertools import takewhile
from typing import Any

from specpool.protocol.prefixes import MAX_EVICTED_PAGES, PageDigests
from specpool.protocol.rounds import ItemStatus

PAGE_SIZE = 16
"""Positions of a page."""
MAX_IDLE_PAGES = 4096
"""Maximum number of cached pages that no sequence holds if `kv_positions` does not limit them."""

Key = Any
"""A sequence."""


class FakeCaches:
    """Slots and pages of a worker. Equal full pages of a namespace are one page."""

    def __init__(
        self, slots: int, kv_positions: int = 0, page_size: int = PAGE_SIZE, is_recurrent: bool = False
    ) -> None:
        """`kv_positions`: positions of all pages; 0: only `slots` limits the sequences.

        `is_recurrent`: whether a sequence can continue only after positions whose states are kept: those of its last
        round, and those at the end of a prompt chunk.
        """
        self.slots, self.kv_positions, self.page_size = slots, kv_positions, page_size
        self.is_recurrent = is_recurrent
        self.missing_states = 0
        """Items that began before the kept states of their sequence."""
        self._kept: dict[Key, tuple[int, int]] = {}
        """Each sequence's positions before its last round, and its committed positions after it."""
        self._reusable: dict[bytes, None] = {}
        """Digests of cached pages after which states are kept, oldest first."""
        self.caches: dict[Key, list[int]] = {}
        self.prefix_cache: dict[bytes, None] = {}
        """Digests of cached pages, least recently used first."""
        self.hits = 0
        """Tokens found in the prefix cache."""
        self._digests: dict[Key, PageDigests] = {}
        """Of the sequences that share pages."""
        self._evicted: dict[Hashable, list[bytes]] = {}
        """Evicted pages not yet reported to each coordinator."""

    @property
    def free_pages(self) -> int:
        """Pages that no sequence holds, if they are limited."""
        return max(0, self.kv_positions // self.page_size - self._num_held())

    def realign(self, key: Key, item: Any, length: int) -> tuple[ItemStatus, int]:
        """Keep an item's base and append its tokens. `length`: positions that the item needs.

        `item`: a message or its data. Return the status, and the number of leading tokens found in the prefix cache.
        """
        base, namespace = item.base_length, _optional(item, "cache_namespace")
        assert item.token_ids, "an item needs tokens"
        assert (base == 0) == (_optional(item, "sampling") is not None), "sampling parameters belong to first contact"
        assert base == 0 or namespace is None, "the namespace belongs to first contact"
        assert not (base % self.page_size and item.expected_prefix_length), "a prefix must begin at a page boundary"
        if len(self.caches.get(key, [])) < base or not self._has_state(key, base):
            return ItemStatus.CACHE_MISS, 0
        self._cut(key, base, namespace)
        tokens = [*self.caches.get(key, [])[:base], *item.token_ids]
        usable = [] if base % self.page_size else self._full_pages(key, tokens[:-1])[base // self.page_size :]
        found = list(takewhile(self.prefix_cache.__contains__, usable))
        while self.is_recurrent and found and found[-1] not in self._reusable:
            found.pop()
        has_slot, num_held = key in self.caches or len(self.caches) < self.slots, self._num_held(key, tokens, length)
        if len(found) * self.page_size < item.expected_prefix_length:
            status = ItemStatus.CACHE_MISS
        elif not has_slot or 0 < self.kv_positions < num_held * self.page_size:
            status = ItemStatus.NO_SLOT
        else:
            self.caches[key] = tokens
            self._kept[key] = base, len(tokens) - getattr(item, "num_unverified", 0)
            self._use(found)
            self._evict(self.kv_positions // self.page_size - num_held)
            self.hits += len(found) * self.page_size
            return ItemStatus.OK, len(found) * self.page_size
        if base == 0:
            self.release(key)
        else:
            self._cut(key, base, None)
        return status, 0

    def keep(self, key: Key) -> None:
        """Put the full pages of a sequence into the prefix cache."""
        pages = self._full_pages(key, self.caches[key])
        if pages and pages[-1] not in self.prefix_cache:
            self._use(pages)
        begin, end = self._kept[key]
        if self.is_recurrent and pages and end - begin > self.page_size:
            self._reusable[pages[-1]] = None
            while len(self._reusable) > self.slots:
                self._report_eviction(digest := next(iter(self._reusable)))
                del self._reusable[digest]

    def reusable_length(self, key: Key) -> int | None:
        """Return after how many leading tokens other sequences can continue. None: after every full page."""
        if not self.is_recurrent:
            return None
        pages = enumerate(self._full_pages(key, self.caches[key]), 1)
        return self.page_size * max((count for count, digest in pages if digest in self._reusable), default=0)

    def _has_state(self, key: Key, base: int) -> bool:
        begin, end = self._kept.get(key, (0, 0))
        is_missing = self.is_recurrent and base not in (0, begin) and base < end
        self.missing_states += is_missing
        return not is_missing

    def release(self, key: Key) -> bool:
        """Free the slot of a sequence. Its pages stay in the prefix cache. Return whether it held a slot."""
        self._digests.pop(key, None)
        self._kept.pop(key, None)
        return self.caches.pop(key, None) is not None

    def forget(self) -> None:
        """Lose all caches, like a restart."""
        for state in (self.caches, self.prefix_cache, self._digests, self._evicted, self._kept, self._reusable):
            state.clear()

    def lose_states(self) -> None:
        """Lose the states after cached pages, without a report."""
        self._reusable.clear()

    def take_evicted(self, coordinator_id: str) -> list[bytes]:
        """Return evicted pages not yet reported to the coordinator. Recording starts with its first call."""
        evicted = self._evicted.setdefault(coordinator_id, [])
        taken, evicted[:MAX_EVICTED_PAGES] = evicted[:MAX_EVICTED_PAGES], []
        return taken

    def _cut(self, key: Key, base: int, namespace: bytes | None) -> None:
        if base:
            if key in self._digests:
                self._digests[key].truncate(base // self.page_size)
            return
        self._digests.pop(key, None)
        if namespace is not None:
            self._digests[key] = PageDigests(namespace, self.page_size)

    def _full_pages(self, key: Key, tokens: Sequence[int]) -> list[bytes]:
        return self._digests[key].first(len(tokens) // self.page_size, tokens) if key in self._digests else []

    def _num_held(self, growing: Key = None, tokens: Sequence[int] = (), length: int = 0) -> int:
        """Return the pages of all sequences, one of which has these tokens and room for `length`. 0: no limit."""
        shared, num_own = set[bytes](), 0
        for key, cached in {**self.caches, growing: tokens}.items() if self.kv_positions else ():
            full = self._full_pages(key, cached)
            shared.update(full)
            num_own += -(-max(len(cached), length if key == growing else 0) // self.page_size) - len(full)
        return len(shared) + num_own

    def _use(self, digests: list[bytes]) -> None:
        """Mark pages as most recently used, a sequence's last page first, so that it is evicted first."""
        for digest in reversed(digests):
            self.prefix_cache.pop(digest, None)
            self.prefix_cache[digest] = None

    def _evict(self, num_idle: int) -> None:
        """Of the pages that no sequence holds, evict all but the `num_idle` most recently used."""
        num_idle = num_idle if self.kv_positions else MAX_IDLE_PAGES
        if len(self.prefix_cache) <= num_idle:
            return
        held = {digest for key, tokens in self.caches.items() for digest in self._full_pages(key, tokens)}
        idle = [digest for digest in self.prefix_cache if digest not in held]
        for digest in idle[: max(0, len(idle) - num_idle)]:
            del self.prefix_cache[digest]
            self._report_eviction(digest)

    def _report_eviction(self, digest: bytes) -> None:
        for evicted in self._evicted.values():
            evicted.append(digest)


def _optional(item: Any, name: str) -> Any:
    """A field of an item; None if it is unset."""
    return getattr(item, name) if not hasattr(item, "HasField") or item.HasField(name) else None
