"""Decides when a pool has room for a background sequence. Pure.

A background sequence enters while no request waits and much of the pool is free, and leaves as soon as little is left.
The gap between the two limits keeps it from starting in vain.
"""

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
    """The room of a pool that requests leave unused."""

    pool: Pool
    max_batch_size: int
    mixes_lengths: bool
    """Whether the policy batches sequences of all lengths, so that a background sequence needs no rounds of its own."""

    def may_enter(self, length: int) -> bool:
        """Whether a background sequence of at most `length` positions may enter."""
        pool, held = self.pool, self.pool.reservations
        if pool.queued or pool.background:
            return False
        if not self._is_shared:
            return not pool.occupied
        if min(pool.capacity, self.max_batch_size - pool.running) <= pool.max_num_seqs // ENTRY_SHARE:
            return False
        return not held.is_limited or length <= held.free - held.capacity.positions // ENTRY_SHARE

    def may_stay(self) -> bool:
        """Whether the background sequence, waiting or in the window, leaves room for the next request."""
        pool, held = self.pool, self.pool.reservations
        if not self._is_shared:
            return pool.occupied + pool.queued <= 1
        if pool.capacity <= pool.queued or pool.running > self.max_batch_size:
            return False
        has_positions = not held.is_limited or held.free > held.capacity.positions // STAY_SHARE
        return has_positions and not pool.is_cramped and (not pool.queued or bool(pool.entering))

    @property
    def _is_shared(self) -> bool:
        return self.mixes_lengths and self.pool.max_num_seqs >= MIN_SHARED_PLACES
