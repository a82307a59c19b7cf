"""Which sequence holds which slot, and how much of it is valid. Pure bookkeeping: no torch, no clock of its own.

What a released sequence has cached stays until its slot is needed, since others may begin with the same tokens. The
same holds for the sequences of an orphaned coordinator: its connections have ended, but it may come back.
"""

from collections import OrderedDict
from dataclasses import dataclass, field

from specpool.engine.cache.extents import Extents
from specpool.protocol.rounds import ItemStatus
from specpool.protocol.sampling import SamplingParams

SequenceKey = tuple[str, int]
"""(coordinator id, sequence id)"""

IDLE_COORDINATORS = 64
"""Coordinators without any sequence that are remembered at a time."""


@dataclass
class Slot:
    """A sequence's slot in the cache, and what is known of the sequence."""

    index: int
    capacity: int = 0
    """Positions reserved for the sequence."""
    num_cached_tokens: int = 0
    round_id: int = 0
    token_ids: list[int] = field(default_factory=list)
    """Tokens that were fed; the first `num_cached_tokens` of them count."""
    sampling: SamplingParams | None = None
    """How the sequence's tokens are chosen; None: by the largest logit."""


class SlotTable:
    """Slots of all coordinators' sequences; a coordinator that falls silent loses its own."""

    def __init__(self, slots: int, extents: Extents | None = None) -> None:
        """`extents`: what the slots share; by default every slot has one of its own."""
        self.total = slots
        self.extents = Extents(slots, longest=1) if extents is None else extents
        self._free = list(range(slots - 1, -1, -1))
        self._slots: dict[SequenceKey, Slot] = {}
        self._released: OrderedDict[SequenceKey, Slot] = OrderedDict()
        """The least recently used first."""
        self._last_seen: OrderedDict[str, float] = OrderedDict()
        """The least recently seen first."""
        self._orphaned: set[str] = set()

    @property
    def in_use(self) -> int:
        """Slots of sequences that were not released."""
        return len(self._slots)

    def realign(self, key: SequenceKey, round_id: int, base_length: int, max_length: int | None = None) -> ItemStatus:
        """Makes the sequence's cache exactly `base_length` positions long, or says why it cannot; then nothing changed.

        `base_length` 0 starts the sequence anew, in a slot of its own with a capacity of `max_length` positions.
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
        """A slot for a sequence that has none, with nothing valid in it; None if the cache is full.

        Released sequences other than `spared` give way first, then sequences of other, orphaned coordinators, beginning
        with the least recently seen one.
        """
        needed = self.extents.capacity_for(max_length)
        victims = [released for released in self._released if released not in (key, spared)]
        if key in self._released and key != spared:
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
        index = min(self._free)  # neighbours are attended without copying
        self.extents.reserve(index, needed)
        self._free.remove(index)
        slot = self._slots[key] = Slot(index, needed)
        return slot

    def inherit(self, key: SequenceKey, source: SequenceKey, max_length: int | None = None) -> Slot | None:
        """The slot of a released sequence, with what is cached in it, for another; None if it cannot be made to fit."""
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
        """Forgets all that was released."""
        for key in list(self._released):
            self._evict(key)

    def _slot(self, key: SequenceKey) -> Slot:
        return self._released[key] if key in self._released else self._slots[key]

    def _evict(self, key: SequenceKey) -> None:
        index = (self._released if key in self._released else self._slots).pop(key).index
        self.extents.release(index)
        self._free.append(index)

    def find(self, key: SequenceKey) -> Slot | None:
        """What is cached of a sequence, released or not, to copy from. A released one counts as used again."""
        if key in self._released:
            self._released.move_to_end(key)
            return self._released[key]
        return self._slots.get(key)

    def release(self, keys: list[SequenceKey]) -> int:
        """Frees the slots of these sequences; returns how many were taken."""
        held = [key for key in dict.fromkeys(keys) if key in self._slots]
        self._released.update((key, self._slots.pop(key)) for key in held)
        return len(held)

    def renew_lease(self, coordinator_id: str, now: float) -> None:
        """Notes that a coordinator is alive at `now` (seconds on any monotonic clock), so that it is not orphaned."""
        self._orphaned.discard(coordinator_id)
        self._last_seen[coordinator_id] = now
        self._last_seen.move_to_end(coordinator_id)
        if len(self._last_seen) > self.total + IDLE_COORDINATORS:
            owners = {owner for owner, _ in (*self._slots, *self._released)} | {coordinator_id}
            self._forget(next(owner for owner in self._last_seen if owner not in owners))

    def orphan(self, coordinator_id: str) -> None:
        """Notes that a coordinator may be gone: until it is seen again, its sequences yield their slots to those of
        others that find none."""
        if coordinator_id in self._last_seen:
            self._orphaned.add(coordinator_id)

    def expire(self, now: float, lease_seconds: float) -> int:
        """Frees the sequences of coordinators silent for longer than the lease; returns how many."""
        gone = {owner for owner, seen in self._last_seen.items() if now - seen > lease_seconds}
        for owner in gone:
            self._forget(owner)
        expired = self.release([key for key in self._slots if key[0] in gone])
        for key in [key for key in self._released if key[0] in gone]:
            self._evict(key)
        return expired

    def _forget(self, coordinator_id: str) -> None:
        del self._last_seen[coordinator_id]
        self._orphaned.discard(coordinator_id)

    def check_integrity(self) -> None:
        """Raises AssertionError if a slot is lost or held twice."""
        held = [slot.index for slot in (*self._slots.values(), *self._released.values())]
        assert sorted(held + self._free) == list(range(self.total)), "slots lost or held twice"
        assert not self._slots.keys() & self._released.keys(), "a sequence is held and released"
        self.extents.check_integrity()
