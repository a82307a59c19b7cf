"""Which sequence holds which slot, and how much of it is valid. Pure bookkeeping: no torch, no clock of its own."""

import enum
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from engine.sampling import Sampler

SequenceKey = tuple[str, int]
"""(coordinator id, sequence id)"""


class Realignment(enum.Enum):
    """What became of a command to keep exactly so many cached positions."""

    OK = "ok"
    CACHE_MISS = "cache miss"
    NO_SLOT = "no slot"
    STALE_ROUND = "stale round"


@dataclass
class Slot:
    """A sequence's place in the arena."""

    index: int
    cached_length: int = 0
    round_id: int = 0
    sampler: "Sampler | None" = None
    """How the sequence's tokens are chosen, unless it is by the largest logit."""


class SlotTable:
    """Slots of all coordinators' sequences; a coordinator that falls silent loses its own."""

    def __init__(self, slots: int) -> None:
        self.total = slots
        self._free = list(range(slots - 1, -1, -1))
        self._slots: dict[SequenceKey, Slot] = {}
        self._last_seen: dict[str, float] = {}

    @property
    def in_use(self) -> int:
        """Slots taken."""
        return len(self._slots)

    def realign(self, key: SequenceKey, round_id: int, base_length: int) -> Realignment:
        """Makes the sequence's cache exactly `base_length` positions long, or says why it cannot; then nothing changed.

        `base_length` 0 starts the sequence anew, in a slot of its own.
        """
        slot = self._slots.get(key)
        if slot is not None and round_id < slot.round_id:
            return Realignment.STALE_ROUND
        if slot is None and base_length == 0:
            if not self._free:
                return Realignment.NO_SLOT
            # The lowest free slot: neighbours are attended without copying.
            slot = self._slots[key] = Slot(self._take_lowest())
        if slot is None or slot.cached_length < base_length:
            return Realignment.CACHE_MISS
        slot.cached_length, slot.round_id = base_length, round_id
        return Realignment.OK

    def __getitem__(self, key: SequenceKey) -> Slot:
        return self._slots[key]

    def release(self, keys: list[SequenceKey]) -> int:
        """Frees the slots of these sequences; returns how many were taken."""
        freed = [slot for key in keys if (slot := self._slots.pop(key, None)) is not None]
        self._free.extend(slot.index for slot in freed)
        return len(freed)

    def renew_lease(self, coordinator_id: str, now: float) -> None:
        """Notes that a coordinator is alive at `now` (seconds on any monotonic clock)."""
        self._last_seen[coordinator_id] = now

    def expire(self, now: float, lease_seconds: float) -> int:
        """Frees the sequences of coordinators silent for longer than the lease; returns how many."""
        gone = {owner for owner, seen in self._last_seen.items() if now - seen > lease_seconds}
        for owner in gone:
            del self._last_seen[owner]
        return self.release([key for key in self._slots if key[0] in gone])

    def check_integrity(self) -> None:
        """Raises AssertionError if a slot is lost or held twice."""
        held = [slot.index for slot in self._slots.values()]
        assert sorted(held + self._free) == list(range(self.total)), "slots lost or held twice"

    def _take_lowest(self) -> int:
        index = min(self._free)
        self._free.remove(index)
        return index
