"""Slots of the KV cache: which sequence holds each slot, and how much of it is valid.

Pure bookkeeping without torch or a clock. A released sequence stays cached until its slot is needed, because others
may share its prefix. A coordinator whose connections have ended is orphaned. Its sequences stay, too, in case it
comes back.
"""

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any

from specpool.engine.cache.extents import Extents
from specpool.engine.cache.turns import Turns
from specpool.engine.sampling.rules import SequenceRules
from specpool.protocol.rounds import Continuation, ItemStatus

SequenceKey = tuple[str, int]  # (coordinator id, sequence id)

IDLE_COORDINATORS = 64  # maximum number of coordinators without sequences to remember


@dataclass
class Slot:
    index: int
    capacity: int = 0  # positions reserved for the sequence
    num_cached_tokens: int = 0
    round_id: int = 0
    token_ids: list[int] = field(default_factory=list)
    """Tokens fed so far; only the first `num_cached_tokens` are valid."""
    sampling: SequenceRules | None = None  # how tokens are chosen; None: greedily
    next_token: int | None = None
    """The last token that the last round yielded, which is not cached yet."""
    num_accepted: int = 0
    """Draft tokens that the last round accepted, if it yielded tokens."""
    own_states: dict[int, Any] = field(default_factory=dict)
    """A feature draft's own states after some numbers of positions, from its last round."""
    continued: tuple[int, Continuation] | None = None
    """How the last round began, if it continued an earlier one: the id of that round, and where."""


class SlotTable:
    """The slots of all coordinators. A coordinator that stays silent loses its slots."""

    def __init__(self, slots: int, extents: Extents | None = None) -> None:
        """`extents`: the cache that the slots share; default: one column per slot."""
        self.total = slots
        self.extents = Extents(slots, max_length=1) if extents is None else extents
        self._free = list(range(slots - 1, -1, -1))
        self._slots: dict[SequenceKey, Slot] = {}
        self._released: OrderedDict[SequenceKey, Slot] = OrderedDict()  # least recently used first
        self._last_seen: OrderedDict[str, float] = OrderedDict()  # least recently seen first
        self._orphaned: set[str] = set()
        self._turns = Turns(slots)

    @property
    def in_use(self) -> int:
        return len(self._slots)

    def realign(self, key: SequenceKey, round_id: int, base_length: int, max_length: int | None = None) -> ItemStatus:
        """Truncate the sequence's cache to `base_length` positions, with room for `max_length`.

        A `base_length` of 0 starts the sequence anew. On any status but OK, nothing has changed, except that a sequence
        that was to start anew has lost its slot if it needs more room than there is.
        """
        if self.is_stale(key, round_id):
            return ItemStatus.STALE_ROUND
        slot = self._slots.get(key)
        if slot is None and base_length == 0:
            slot = self.take(key, max_length)
            if slot is None:
                return ItemStatus.NO_SLOT
        if slot is None or slot.num_cached_tokens < base_length:
            return ItemStatus.CACHE_MISS
        if max_length is not None and not self.grow(key, max_length):
            if base_length == 0:
                self._evict(key)
            return ItemStatus.NO_SLOT
        slot.num_cached_tokens, slot.round_id = base_length, round_id
        slot.next_token = slot.continued = None
        return ItemStatus.OK

    def is_stale(self, key: SequenceKey, round_id: int) -> bool:
        """Whether a later round of the sequence has begun."""
        return key in self._slots and round_id < self._slots[key].round_id

    def continuation(self, key: SequenceKey, round_id: int, after_round_id: int) -> Continuation | None:
        """Where a sequence continues after a round, its last one; None if it cannot. A repeated round gets the same."""
        slot = self._slots.get(key)
        if slot is None:
            return None
        if slot.round_id == round_id and slot.continued is not None and slot.continued[0] == after_round_id:
            return slot.continued[1]
        if slot.round_id != after_round_id or slot.next_token is None:
            return None
        return Continuation(slot.num_cached_tokens, slot.next_token, slot.num_accepted)

    def grow(self, key: SequenceKey, max_length: int, *, evicts: bool = True) -> bool:
        """Reserve room for this many positions of a sequence with a slot. Returns False if there is too little.

        `evicts`: whether other caches may have to yield.
        """
        slot, capacity = self._slots[key], self.extents.capacity_for(max_length)
        if capacity <= slot.capacity:
            return True
        missing = capacity - slot.capacity
        if missing > self.extents.free and not (evicts and self._make_room(missing, self._victims(key))):
            return False
        self.extents.resize(slot.index, capacity)
        slot.capacity = capacity
        return True

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

    def take(self, key: SequenceKey, max_length: int | None = None, spared: SequenceKey | None = None) -> Slot | None:
        """Allocate an empty slot for a sequence that has none; None if the cache is full.

        Evicts released sequences first, except `spared`, then sequences of other, orphaned coordinators. The least
        recently seen coordinator comes first.
        """
        needed = self.extents.capacity_for(max_length)
        victims = self._victims(key, spared)
        if not (self._free or victims) or not self._has_room(needed, victims):
            return None
        if not self._free or key in self._released:
            self._evict(victims.pop(0))
        self._make_room(needed, victims)
        index = min(self._free)  # attention reads neighbouring slots without copying
        self.extents.reserve(index, needed)
        self._free.remove(index)
        slot = self._slots[key] = Slot(index, needed)
        return slot

    def _victims(self, key: SequenceKey, spared: SequenceKey | None = None) -> list[SequenceKey]:
        """Sequences to evict for this one, first to last."""
        released = [released for released in self._released if released not in (key, spared)]
        own = [key] if key in self._released else []
        orphans = [held for held in self._slots if held[0] in self._orphaned and held[0] != key[0]]
        return own + released + sorted(orphans, key=lambda orphan: self._last_seen[orphan[0]])

    def _has_room(self, columns: int, victims: list[SequenceKey]) -> bool:
        return self.extents.free + sum(self.extents.length(self._slot(key).index) for key in victims) >= columns

    def _make_room(self, columns: int, victims: list[SequenceKey]) -> bool:
        """Evict as many victims as needed to free this many columns. Returns False if all would not be enough."""
        if not self._has_room(columns, victims):
            return False
        for victim in victims:
            if self.extents.free >= columns:
                break
            self._evict(victim)
        return True

    def inherit(self, key: SequenceKey, source: SequenceKey, max_length: int | None = None) -> Slot | None:
        """Hand a released sequence's slot and cache to another sequence; None if there is no room for `max_length`."""
        slot, needed = self._released[source], self.extents.capacity_for(max_length)
        victims = [victim for victim in self._victims(key) if victim != source]
        if not self._make_room(needed - slot.capacity, victims):
            return None
        self.extents.resize(slot.index, needed)
        del self._released[source]
        if key in self._released:
            self._evict(key)
        cached = min(slot.num_cached_tokens, needed)
        inherited = self._slots[key] = Slot(slot.index, needed, cached, token_ids=slot.token_ids)
        return inherited

    def drop_released(self) -> None:
        for key in list(self._released):
            self._evict(key)

    def _slot(self, key: SequenceKey) -> Slot:
        return self._released[key] if key in self._released else self._slots[key]

    def _evict(self, key: SequenceKey) -> None:
        index = (self._released if key in self._released else self._slots).pop(key).index
        self.extents.release(index)
        self._free.append(index)

    def find(self, key: SequenceKey) -> Slot | None:
        """Return the slot of a held or released sequence, and mark a released one as recently used."""
        if key in self._released:
            self._released.move_to_end(key)
            return self._released[key]
        return self._slots.get(key)

    def release(self, keys: list[SequenceKey]) -> int:
        """Release these sequences, which keep only their cached positions. Returns how many held a slot."""
        held = [key for key in dict.fromkeys(keys) if key in self._slots]
        for key in held:
            slot = self._released[key] = self._slots.pop(key)
            slot.capacity = min(slot.capacity, self.extents.capacity_for(slot.num_cached_tokens))
            self.extents.resize(slot.index, slot.capacity)
        for owner in {key[0] for key in held}:
            self._turns.ended(owner, self._last_seen.get(owner, 0.0))
        return len(held)

    def release_all(self, coordinator_id: str) -> int:
        """Release all sequences of a coordinator. Returns how many held a slot."""
        return self.release([key for key in self._slots if key[0] == coordinator_id])

    def renew_lease(self, coordinator_id: str, now: float) -> None:
        """Record that a coordinator is alive at `now`, in seconds on any monotonic clock."""
        self._orphaned.discard(coordinator_id)
        self._last_seen[coordinator_id] = now
        self._last_seen.move_to_end(coordinator_id)
        if len(self._last_seen) > self.total + IDLE_COORDINATORS:
            owners = {owner for owner, _ in (*self._slots, *self._released)} | {coordinator_id}
            self._forget(next(owner for owner in self._last_seen if owner not in owners))

    def orphan(self, coordinator_id: str) -> None:
        """Record that a coordinator may be gone: until it is seen again, others may evict its sequences."""
        if coordinator_id in self._last_seen:
            self._orphaned.add(coordinator_id)

    def expire(self, now: float, lease_seconds: float) -> int:
        """Free the sequences of coordinators silent for longer than the lease; returns how many."""
        expired_owners = {owner for owner, seen in self._last_seen.items() if now - seen > lease_seconds}
        for owner in expired_owners:
            self._forget(owner)
        expired = self.release([key for key in self._slots if key[0] in expired_owners])
        for key in [key for key in self._released if key[0] in expired_owners]:
            self._evict(key)
        return expired

    def _forget(self, coordinator_id: str) -> None:
        del self._last_seen[coordinator_id]
        self._orphaned.discard(coordinator_id)

    def check_integrity(self) -> None:
        """Raise AssertionError if a slot is lost or held twice."""
        held = [slot.index for slot in (*self._slots.values(), *self._released.values())]
        assert sorted(held + self._free) == list(range(self.total)), "slots lost or held twice"
        assert not self._slots.keys() & self._released.keys(), "a sequence is held and released"
        self.extents.check_integrity()
