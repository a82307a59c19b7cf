"""Slots of the KV cache: which sequence holds each slot, and how much of it is valid.

Pure bookkeeping without torch or a clock. A released sequence stays cached until its slot is needed, because others
may share its prefix. A coordinator whose connections have ended is orphaned. Its sequences stay, too, in case it
comes back.
"""

from collections import OrderedDict
from dataclasses import dataclass, field

from specpool.engine.cache.extents import Extents
from specpool.protocol.rounds import ItemStatus
from specpool.protocol.sampling import SamplingParams

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
    sampling: SamplingParams | None = None  # how tokens are chosen; None: greedily


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

    @property
    def in_use(self) -> int:
        return len(self._slots)

    def realign(self, key: SequenceKey, round_id: int, base_length: int, max_length: int | None = None) -> ItemStatus:
        """Truncate the sequence's cache to `base_length` positions. On any status but OK, nothing has changed.

        A `base_length` of 0 starts the sequence anew, in a slot with room for `max_length` positions.
        """
        slot = self._slots.get(key)
        if slot is not None and round_id < slot.round_id:
            return ItemStatus.STALE_ROUND
        if slot is None and base_length == 0:
            slot = self.take(key, max_length)
            if slot is None:
                return ItemStatus.NO_SLOT
        if slot is None or slot.num_cached_tokens < base_length:
            return ItemStatus.CACHE_MISS
        slot.num_cached_tokens, slot.round_id = base_length, round_id
        return ItemStatus.OK

    def __getitem__(self, key: SequenceKey) -> Slot:
        return self._slots[key]

    def __contains__(self, key: SequenceKey) -> bool:
        return key in self._slots

    def take(self, key: SequenceKey, max_length: int | None = None, spared: SequenceKey | None = None) -> Slot | None:
        """Allocate an empty slot for a sequence that has none; None if the cache is full.

        Evicts released sequences first, except `spared`, then sequences of other, orphaned coordinators. The least
        recently seen coordinator comes first.
        """
        needed = self.extents.capacity_for(max_length)
        victims = [released for released in self._released if released not in (key, spared)]
        if key in self._released:
            victims.insert(0, key)
        orphans = [held for held in self._slots if held[0] in self._orphaned and held[0] != key[0]]
        victims += sorted(orphans, key=lambda orphan: self._last_seen[orphan[0]])
        held = sum(self.extents.length(self._slot(victim).index) for victim in victims)
        if not (self._free or victims) or self.extents.free + held < needed:
            return None
        for victim in victims:
            if victim != key and self._free and self.extents.free >= needed:
                break
            self._evict(victim)
        index = min(self._free)  # attention reads neighbouring slots without copying
        self.extents.reserve(index, needed)
        self._free.remove(index)
        slot = self._slots[key] = Slot(index, needed)
        return slot

    def inherit(self, key: SequenceKey, source: SequenceKey, max_length: int | None = None) -> Slot | None:
        """Hand a released sequence's slot and cache to another sequence; None if it cannot grow as needed."""
        slot, needed = self._released[source], self.extents.capacity_for(max_length)
        if not self.extents.resize(slot.index, needed):
            return None
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
        """Release these sequences. Returns how many held a slot."""
        held = [key for key in dict.fromkeys(keys) if key in self._slots]
        self._released.update((key, self._slots.pop(key)) for key in held)
        return len(held)

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
