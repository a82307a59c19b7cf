"""Decides when there is room for a background sequence. Pure.

A background sequence enters while no request waits and much of a window is free, and leaves as soon as little is left.
The gap between the two limits keeps it from starting in vain.
"""

from collections.abc import Callable
from dataclasses import dataclass

from coordinator.scheduling.pool import Pool

# Share of the places and of the KV positions that are still free after a background sequence has entered.
ENTRY_SHARE = 4
# Share of the KV positions that must stay free.
STAY_SHARE = 16
# In a smaller pool, or with a policy that groups by length, a background sequence only runs alone.
MIN_SHARED_PLACES = 4


@dataclass(frozen=True)
class SpareRoom:
    """The room that requests leave unused in the windows of the target workers."""

    pools: Callable[[], list[Pool]]
    """The open windows."""
    max_batch_size: int
    mixes_lengths: bool
    """Whether the policy batches sequences of all lengths, so that a background sequence needs no rounds of its own."""

    def may_enter(self, length: int) -> bool:
        """Whether a background sequence of at most `length` positions may enter."""
        pools = self.pools()
        return not any(pool.background for pool in pools) and any(self._has_room(pool, length) for pool in pools)

    def may_stay(self) -> bool:
        """Whether the background sequence, waiting or in a window, leaves room for the next request."""
        pools = self.pools()
        return any(map(self._has_room_left, [pool for pool in pools if pool.background] or pools))

    def _has_room(self, pool: Pool, length: int) -> bool:
        held = pool.reservations
        if pool.queued:
            return False
        if not self._is_shared(pool):
            return not pool.occupied
        if min(pool.capacity, self.max_batch_size - pool.running) <= pool.max_num_seqs // ENTRY_SHARE:
            return False
        return not held.is_limited or length <= held.free - held.capacity.positions // ENTRY_SHARE

    def _has_room_left(self, pool: Pool) -> bool:
        held = pool.reservations
        if not self._is_shared(pool):
            return pool.occupied + pool.queued <= 1
        if pool.capacity <= pool.queued or pool.running > self.max_batch_size:
            return False
        has_positions = not held.is_limited or held.free > held.capacity.positions // STAY_SHARE
        return has_positions and not pool.is_cramped and (not pool.queued or bool(pool.entering))

    def _is_shared(self, pool: Pool) -> bool:
        return self.mixes_lengths and pool.max_num_seqs >= MIN_SHARED_PLACES
