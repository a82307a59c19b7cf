"""Caches of fake workers: lists of token ids in shared pages, as the protocol defines them."""

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
    """Slots and pages of the sequences of a worker. Equal full pages of a namespace are one page."""

    def __init__(self, slots: int, kv_positions: int = 0, page_size: int = PAGE_SIZE) -> None:
        """`kv_positions`: positions of all pages; 0: only `slots` limits the sequences."""
        self.slots, self.kv_positions, self.page_size = slots, kv_positions, page_size
        self.caches: dict[Key, list[int]] = {}
        self.prefix_cache: dict[bytes, None] = {}
        """Digests of cached pages, least recently used first."""
        self.hits = 0
        """Tokens found in the prefix cache."""
        self._digests: dict[Key, PageDigests] = {}
        """Of the sequences that share pages."""
        self._evicted: dict[Hashable, list[bytes]] = {}
        """Evicted pages that each coordinator has not been told of."""

    @property
    def free_pages(self) -> int:
        """Pages that no sequence holds, if they are limited."""
        return max(0, self.kv_positions // self.page_size - self._num_held())

    def realign(self, key: Key, item: Any, length: int) -> tuple[ItemStatus, int]:
        """Keep the base of an item and append its tokens. `length`: positions that it needs.

        Return the status, and the number of leading tokens that the prefix cache held. `item`: a message or its data.
        """
        base, namespace = item.base_length, _optional(item, "cache_namespace")
        assert item.token_ids, "an item without tokens"
        assert (base == 0) == (_optional(item, "sampling") is not None), "sampling parameters belong to first contact"
        assert base == 0 or namespace is None, "the namespace belongs to first contact"
        assert not (base % self.page_size and item.expected_prefix_length), "a prefix is expected within a page"
        if len(self.caches.get(key, [])) < base:
            return ItemStatus.CACHE_MISS, 0
        self._cut(key, base, namespace)
        tokens = [*self.caches.get(key, [])[:base], *item.token_ids]
        usable = [] if base % self.page_size else self._full_pages(key, tokens[:-1])[base // self.page_size :]
        found = list(takewhile(self.prefix_cache.__contains__, usable))
        has_slot, num_held = key in self.caches or len(self.caches) < self.slots, self._num_held(key, tokens, length)
        if len(found) * self.page_size < item.expected_prefix_length:
            status = ItemStatus.CACHE_MISS
        elif not has_slot or 0 < self.kv_positions < num_held * self.page_size:
            status = ItemStatus.NO_SLOT
        else:
            self.caches[key] = tokens
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

    def release(self, key: Key) -> bool:
        """Free the slot of a sequence. Its pages stay in the prefix cache. Return whether it held a slot."""
        self._digests.pop(key, None)
        return self.caches.pop(key, None) is not None

    def forget(self) -> None:
        """Lose all caches, like a restart."""
        for state in (self.caches, self.prefix_cache, self._digests, self._evicted):
            state.clear()

    def take_evicted(self, coordinator_id: str) -> list[bytes]:
        """Return evicted pages that the coordinator has not been told of. From the first call on, all are recorded."""
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
        """Pages that all sequences hold, if one has these tokens and room for `length`. 0: they are not limited."""
        shared, num_own = set[bytes](), 0
        for key, cached in {**self.caches, growing: tokens}.items() if self.kv_positions else ():
            full = self._full_pages(key, cached)
            shared.update(full)
            num_own += -(-max(len(cached), length if key == growing else 0) // self.page_size) - len(full)
        return len(shared) + num_own

    def _use(self, digests: list[bytes]) -> None:
        """Mark pages of the prefix cache as used last, and the last page of a sequence first."""
        for digest in reversed(digests):
            self.prefix_cache.pop(digest, None)
            self.prefix_cache[digest] = None

    def _evict(self, num_idle: int) -> None:
        """Evict all pages that no sequence holds but the `num_idle` that were used last."""
        num_idle = num_idle if self.kv_positions else MAX_IDLE_PAGES
        if len(self.prefix_cache) <= num_idle:
            return
        held = {digest for key, tokens in self.caches.items() for digest in self._full_pages(key, tokens)}
        idle = [digest for digest in self.prefix_cache if digest not in held]
        for digest in idle[: max(0, len(idle) - num_idle)]:
            del self.prefix_cache[digest]
            for evicted in self._evicted.values():
                evicted.append(digest)


def _optional(item: Any, name: str) -> Any:
    """A field of an item; None if it is unset."""
    return getattr(item, name) if not hasattr(item, "HasField") or item.HasField(name) else None
