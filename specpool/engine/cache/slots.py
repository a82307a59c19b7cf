"""Slots of the KV cache: which sequence holds each slot, and how much of it is valid.

Pure bookkeeping without torch or a clock. The full pages of a sequence stay in the prefix cache when it ends. A
coordinator whose connections have ended is orphaned. Its sequences stay, too, in case it comes back.
"""

from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from specpool.engine.cache.carried import CarriedDraft
from specpool.engine.cache.checkpoints import Checkpoints
from specpool.engine.cache.pages import PageTables
from specpool.engine.cache.turns import Turns
from specpool.engine.sampling.rules import SequenceRules
from specpool.protocol.prefixes import PageDigests
from specpool.protocol.rounds import Continuation, ItemStatus, SequenceItem

SequenceKey = tuple[str, int]  # (coordinator id, sequence id)

IDLE_COORDINATORS = 64  # maximum number of coordinators without sequences to remember


@dataclass
class Slot:
    index: int
    num_cached_tokens: int = 0
    round_id: int = 0
    token_ids: list[int] = field(default_factory=list)
    """Tokens fed so far; only the first `num_cached_tokens` are valid."""
    prefix_length: int = 0
    """Tokens found in the prefix cache by the last round."""
    digests: PageDigests | None = None
    """Digests of full pages. None: the sequence neither uses nor leaves cached prefixes."""
    num_digested_pages: int = 0
    """Leading pages in the prefix cache. The cached page may be an equal one of another slot."""
    cache_namespace: bytes | None = None
    """Namespace of the prefix cache, given on first contact."""
    sampling: SequenceRules | None = None  # how tokens are chosen; None: greedily
    next_token: int | None = None
    """The last token that the last round yielded, which is not cached yet."""
    num_accepted: int = 0
    """Draft tokens that the last round accepted, if it yielded tokens."""
    own_states: dict[int, Any] = field(default_factory=dict)
    """A feature draft's own states after some numbers of positions, from its last round."""
    continued: tuple[int, Continuation] | None = None
    """How the last round began, if it continued an earlier one: the id of that round, and where."""
    translated: Any = None
    """The draft worker's `TranslatedSequence`, if the target has another tokenizer."""
    carried: CarriedDraft = field(default_factory=CarriedDraft)
    """State of the worker's own draft, if the worker carries a draft."""


class SlotTable:
    """The slots of all coordinators. A coordinator that stays silent loses its slots."""

    def __init__(
        self,
        slots: int,
        tables: PageTables | None = None,
        window: int | None = None,
        checkpoints: Checkpoints | None = None,
    ) -> None:
        """`tables`: page tables of the slots. Default: one page of one column per slot.

        `window`: number of positions that a row attends to, including its own; None: all positions up to its own.
        Pages before the windows of a round's rows are freed once the round has run. `checkpoints`: those of recurrent
        layers, if the model has any.
        """
        self.checkpoints = checkpoints
        self._window = window
        self.total, self.tables = slots, tables or PageTables(slots, max_length=1, columns=slots, page_size=1)
        self.tables.pool.on_evict = self._record_eviction
        if checkpoints is not None:
            checkpoints.pool.on_evict = self._record_eviction
        self._free = list(range(slots - 1, -1, -1))
        self._slots: dict[SequenceKey, Slot] = {}
        self._last_seen: OrderedDict[str, float] = OrderedDict()  # least recently seen first
        self._evicted: dict[str, deque[bytes]] = {}
        """Digests of evicted pages not yet reported to each coordinator."""
        self._orphaned: set[str] = set()
        self._turns = Turns(slots)

    @property
    def in_use(self) -> int:
        return len(self._slots)

    @property
    def max_draft_tokens(self) -> int:
        """Maximum number of draft tokens that a sequence can reject: those that fit in a tail of recurrent layers."""
        return self.tables.max_length if self.checkpoints is None else self.checkpoints.rows

    def realign(self, key: SequenceKey, round_id: int, item: SequenceItem, columns: int) -> ItemStatus:
        """Truncate the sequence's cache to the item's `base_length` and provide pages for `columns`.

        A `base_length` of 0 restarts the sequence. Leading tokens found in the prefix cache move from the item's tokens
        to its base. On NO_SLOT, the sequence keeps its first `base_length` positions; without any, it loses its slot.
        """
        if self.is_stale(key, round_id):
            return ItemStatus.STALE_ROUND
        is_new, slot = item.base_length == 0, self._slots.get(key)
        if slot is None and is_new:
            slot = self.take(key, columns=0)
            if slot is None:
                return ItemStatus.NO_SLOT
        if slot is None or not self._holds(slot, item.base_length) or not self._cut(slot, item):
            return ItemStatus.CACHE_MISS
        slot.num_cached_tokens, slot.next_token, slot.continued = item.base_length, None, None
        slot.carried.realign(item.base_length)
        status = self._extend(key, slot, item, columns)
        if status is ItemStatus.OK:
            slot.num_cached_tokens, slot.round_id = item.base_length, round_id
        elif is_new:
            self._evict(key)
        return status

    def _holds(self, slot: Slot, base_length: int) -> bool:
        """Return whether the cache holds every position below `base_length` that later rows attend to."""
        if self.reach(slot, base_length) < base_length:
            return False
        first = self.tables.first(slot.index) if base_length else 0  # a restarted sequence reads none
        return base_length <= slot.num_cached_tokens and first <= self._first_read(base_length)

    def reach(self, slot: Slot, length: int) -> int:
        """Return the largest number of cached positions, at most `length`, after which a sequence can continue."""
        return length if self.checkpoints is None else self.checkpoints.reach(slot.index, length)

    def _first_read(self, start: int) -> int:
        """Return the first position that rows from `start` on attend to."""
        return 0 if self._window is None else max(0, start + 1 - self._window)

    def _cut(self, slot: Slot, item: SequenceItem) -> bool:
        """Protect cached pages from being overwritten after the base. Return False if the first one is shared."""
        base, tables = item.base_length, self.tables
        whole, rest = divmod(base, tables.page_size)
        if self.checkpoints is not None:
            self.checkpoints.truncate(slot.index, base)
        if base == 0:
            tables.truncate(slot.index, 0)
            slot.digests, slot.num_digested_pages, slot.own_states = None, 0, {}
            slot.cache_namespace = item.cache_namespace
            if item.cache_namespace is not None:
                slot.digests = PageDigests(item.cache_namespace, tables.page_size)
        elif slot.digests is not None and slot.num_digested_pages > whole:
            if rest and not tables.pool.uncache(*tables.pages(slot.index, whole, whole + 1)):
                return False
            tables.truncate(slot.index, base)
            slot.digests.truncate(whole)
            slot.num_digested_pages = whole
        return True

    def _extend(self, key: SequenceKey, slot: Slot, item: SequenceItem, columns: int) -> ItemStatus:
        """Add cached pages of the item's tokens, then free pages."""
        base, tables = item.base_length, self.tables
        shares = len(item.token_ids) > tables.page_size or item.expected_prefix_length > 0
        if not shares and tables.fits(slot.index, columns):  # as in most rounds
            slot.prefix_length = 0
            return ItemStatus.OK
        tables.truncate(slot.index, max(base, columns))
        shared = self._share(slot, item)
        if len(shared) * tables.page_size < item.expected_prefix_length:
            tables.pool.drop(shared)
            if slot.digests is not None:
                slot.digests.truncate(slot.num_digested_pages)
            return ItemStatus.CACHE_MISS
        if shared:
            tables.truncate(slot.index, base)
            tables.add(slot.index, shared)
            slot.num_digested_pages += len(shared)
            slot.token_ids[base:] = item.token_ids[: len(shared) * tables.page_size]
        slot.prefix_length = len(shared) * tables.page_size
        item.base_length, item.token_ids = base + slot.prefix_length, item.token_ids[slot.prefix_length :]
        if not self.grow(key, columns):
            return ItemStatus.NO_SLOT
        if shared and self.checkpoints is not None and slot.digests is not None:
            digests = slot.digests.first(slot.num_digested_pages, slot.token_ids)
            self.checkpoints.share(slot.index, item.base_length, digests[-1])
        return ItemStatus.OK

    def keep(self, key: SequenceKey, num_cached_tokens: int) -> None:
        """Mark the first positions of a sequence as valid, and add its full pages to the prefix cache.

        Free the pages that neither a repeat of this round nor a later round can read.
        """
        slot, tables = self._slots[key], self.tables
        start, slot.num_cached_tokens = slot.num_cached_tokens, num_cached_tokens
        first, count = slot.num_digested_pages, num_cached_tokens // tables.page_size
        known: Sequence[bytes] = ()
        if slot.digests is not None and count > first:
            digests = slot.digests.first(count, slot.token_ids)
            known = [digest for digest in digests[first:] if tables.pool.has(digest)]
            for page, digest in zip(tables.pages(slot.index, first, count), digests[first:], strict=True):
                tables.pool.cache(page, digest)
            slot.num_digested_pages = count
        if slot.digests is not None and self.checkpoints is not None:
            self.checkpoints.cache(slot.index, slot.digests.first(count, slot.token_ids), known)
        tables.free_before(slot.index, self._first_read(start))

    def _share(self, slot: Slot, item: SequenceItem) -> list[int]:
        """Share the cached pages of the item's leading tokens, at most `max_prefix_length` tokens."""
        size = self.tables.page_size
        whole, rest = divmod(item.base_length, size)
        count = item.max_prefix_length // size
        if slot.digests is None or rest or not count or slot.num_digested_pages < whole:
            return []
        token_ids = [*slot.token_ids[: item.base_length], *item.token_ids]
        shared = self._take_prefix(slot.digests.first(whole + count, token_ids), whole)
        slot.digests.truncate(whole + len(shared))  # other tokens may follow, if this round fails or rejects drafts
        return shared

    def cached_prefix(self, namespace: bytes, token_ids: Sequence[int]) -> int:
        """Return how many leading tokens of a new sequence the prefix cache holds, never counting the last token."""
        size, pool = self.tables.page_size, self.tables.pool
        pages = self._take_prefix(PageDigests(namespace, size).first((len(token_ids) - 1) // size, token_ids))
        pool.drop(pages)
        return len(pages) * size

    def _take_prefix(self, digests: Sequence[bytes], held: int = 0) -> list[int]:
        """Share the leading cached pages that a sequence can begin with. `held`: leading pages that it has already."""
        pages = self.tables.pool.share(digests[held:])
        if self.checkpoints is not None:
            count = self.checkpoints.shared_pages(digests[: held + len(pages)]) - held
            self.tables.pool.drop(pages[max(0, count) :])
            del pages[max(0, count) :]
        return pages

    def reusable_length(self, key: SequenceKey) -> int | None:
        """Return after how many leading tokens other sequences can continue. None: after every full page."""
        slot = self._slots[key]
        if self.checkpoints is None:
            return None
        return self.checkpoints.reusable_length(slot.index, 0 if slot.digests is None else slot.num_cached_tokens)

    def is_stale(self, key: SequenceKey, round_id: int) -> bool:
        """Whether a later round of the sequence has begun."""
        return key in self._slots and round_id < self._slots[key].round_id

    def continuation(self, key: SequenceKey, round_id: int, after_round_id: int) -> Continuation | None:
        """Return where a sequence continues after its last round; None if it cannot. Same for a repeated round."""
        slot = self._slots.get(key)
        if slot is None:
            return None
        if slot.round_id == round_id and slot.continued is not None and slot.continued[0] == after_round_id:
            return slot.continued[1]
        if slot.round_id != after_round_id or slot.next_token is None:
            return None
        return Continuation(slot.num_cached_tokens, slot.next_token, slot.num_accepted)

    def grow(self, key: SequenceKey, columns: int, *, evicts: bool = True) -> bool:
        """Give a sequence with a slot pages for this many columns. Return False if too few are free.

        `evicts`: whether sequences of orphaned coordinators may have to yield, if that is enough.
        """
        index, tables = self._slots[key].index, self.tables
        if tables.grow(index, columns):
            return True
        victims = self._victims(key) if evicts else []
        freed = tables.held_by([self._slots[victim].index for victim in victims])
        if tables.missing(index, columns) > tables.pool.free + freed:
            return False
        while not tables.grow(index, columns):
            self._evict(victims.pop(0))
        return True

    def capacity(self, slot: Slot) -> int:
        """Return the columns that a slot's pages hold."""
        return self.tables.capacity(slot.index)

    def __getitem__(self, key: SequenceKey) -> Slot:
        return self._slots[key]

    def __contains__(self, key: SequenceKey) -> bool:
        return key in self._slots

    def admits(self, coordinator_id: str) -> bool:
        """Whether a coordinator may start a sequence, or has to wait for its turn."""
        return self._turns.admits(coordinator_id, self._last_seen.get(coordinator_id, 0.0))

    def answered(self, coordinator_id: str, status: ItemStatus) -> None:
        """Record the answer to a coordinator that wanted to start a sequence."""
        now = self._last_seen.get(coordinator_id, 0.0)
        if status is ItemStatus.OK:
            self._turns.started(coordinator_id, now)
        elif status is ItemStatus.NO_SLOT:
            self._turns.refused(coordinator_id, now)

    def take(self, key: SequenceKey, columns: int) -> Slot | None:
        """Allocate a slot with pages for `columns` to a sequence that has none. None if there is no room."""
        if not self._free and (victims := self._victims(key)):
            self._evict(victims[0])
        if not self._free:
            return None
        slot = self._slots[key] = Slot(self._free.pop())
        self.tables.truncate(slot.index, 0)
        if not self.grow(key, columns):
            self._evict(key)
            return None
        return slot

    def _victims(self, key: SequenceKey) -> list[SequenceKey]:
        """Return the orphaned sequences to evict for this one, starting with the least recently seen coordinator's."""
        orphans = [held for held in self._slots if held[0] in self._orphaned and held[0] != key[0]]
        return sorted(orphans, key=lambda orphan: self._last_seen[orphan[0]])

    def _evict(self, key: SequenceKey) -> None:
        index = self._slots.pop(key).index
        self.tables.truncate(index, 0)
        if self.checkpoints is not None:
            self.checkpoints.truncate(index, 0)
        self._free.append(index)

    def find(self, key: SequenceKey) -> Slot | None:
        """Return the slot of a sequence, if it has one."""
        return self._slots.get(key)

    def release(self, keys: list[SequenceKey]) -> int:
        """Release sequences. Their full pages stay in the prefix cache. Return how many held a slot."""
        held = [key for key in dict.fromkeys(keys) if key in self._slots]
        for key in held:
            self._evict(key)
        for owner in {key[0] for key in held}:
            self._turns.ended(owner, self._last_seen.get(owner, 0.0))
        return len(held)

    def release_all(self, coordinator_id: str) -> int:
        """Release all sequences of a coordinator. Return how many held a slot."""
        return self.release([key for key in self._slots if key[0] == coordinator_id])

    def take_evicted(self, coordinator_id: str, limit: int) -> list[bytes]:
        """Return at most `limit` digests of evicted pages not yet reported to the coordinator."""
        evicted = self._evicted.get(coordinator_id, deque())
        return [evicted.popleft() for _ in range(min(limit, len(evicted)))]

    def _record_eviction(self, digest: bytes) -> None:
        for evicted in self._evicted.values():
            evicted.append(digest)

    def renew_lease(self, coordinator_id: str, now: float) -> None:
        """Record that a coordinator is alive at `now`, in seconds on any monotonic clock."""
        self._orphaned.discard(coordinator_id)
        self._last_seen[coordinator_id] = now
        self._last_seen.move_to_end(coordinator_id)
        self._evicted.setdefault(coordinator_id, deque(maxlen=self.tables.pool.count))
        if len(self._last_seen) > self.total + IDLE_COORDINATORS:
            owners = {owner for owner, _ in self._slots} | {coordinator_id}
            self._forget(next(owner for owner in self._last_seen if owner not in owners))

    def orphan(self, coordinator_id: str) -> None:
        """Record that a coordinator may be gone: until it is seen again, others may evict its sequences."""
        if coordinator_id in self._last_seen:
            self._orphaned.add(coordinator_id)

    def expire(self, now: float, lease_seconds: float) -> int:
        """Free the sequences of coordinators silent for longer than the lease; return how many."""
        expired_owners = {owner for owner, seen in self._last_seen.items() if now - seen > lease_seconds}
        for owner in expired_owners:
            self._forget(owner)
        return self.release([key for key in self._slots if key[0] in expired_owners])

    def _forget(self, coordinator_id: str) -> None:
        del self._last_seen[coordinator_id], self._evicted[coordinator_id]
        self._orphaned.discard(coordinator_id)

    def check_integrity(self) -> None:
        """Raise AssertionError if a slot is lost or held twice, or its pages and their digests differ."""
        held = [slot.index for slot in self._slots.values()]
        assert sorted(held + self._free) == list(range(self.total)), "slots lost or held twice"
        self.tables.check_integrity()
        if self.checkpoints is not None:
            self.checkpoints.check_integrity()
        for slot in self._slots.values():
            count = slot.num_digested_pages
            assert slot.num_cached_tokens <= self.capacity(slot), "cached positions have no page"
            if slot.digests is None:
                continue
            slot.digests.truncate(0)
            first = min(count, self.tables.first(slot.index) // self.tables.page_size)
            digests = slot.digests.first(count, slot.token_ids)[first:]
            for page, digest in zip(self.tables.pages(slot.index, first, count), digests, strict=True):
                assert self.tables.pool.digest_of(page) in (None, digest), "a page is cached as another one"
