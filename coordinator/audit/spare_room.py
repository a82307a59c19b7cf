"""Decides when there is room for a background sequence. Pure.

A background sequence enters while no request waits and much of a window is free, and leaves as soon as little is left.
The gap between the two limits keeps it from starting in vain.
"""

from collections.abc import Callable
from dataclasses import dataclass

from coordinator.scheduling.window import Window

# Share of the places and of the KV positions that are still free after a background sequence has entered.
ENTRY_SHARE = 4
# Share of the KV positions that must stay free.
STAY_SHARE = 16
# In a smaller window, or with a policy that groups by length, a background sequence only runs alone.
MIN_SHARED_PLACES = 4


@dataclass(frozen=True)
class SpareRoom:
    """The room that requests leave unused in the windows of the target workers."""

    windows: Callable[[], list[Window]]
    """The open windows."""
    max_batch_size: int
    mixes_lengths: bool
    """Whether the policy batches sequences of all lengths, so that a background sequence needs no rounds of its own."""

    def may_enter(self, length: int) -> bool:
        """Whether a background sequence of at most `length` positions may enter."""
        windows = self.windows()
        if any(window.background for window in windows):
            return False
        return any(self._has_room(window, length) for window in windows)

    def may_stay(self) -> bool:
        """Whether the background sequence, waiting or in a window, leaves room for the next request."""
        windows = self.windows()
        return any(map(self._has_room_left, [window for window in windows if window.background] or windows))

    def _has_room(self, window: Window, length: int) -> bool:
        held = window.reservations
        if window.queued:
            return False
        if not self._is_shared(window):
            return not window.occupied
        if min(window.capacity, self.max_batch_size - window.running) <= window.max_num_seqs // ENTRY_SHARE:
            return False
        return not held.is_limited or length <= held.free - held.capacity.positions // ENTRY_SHARE

    def _has_room_left(self, window: Window) -> bool:
        held = window.reservations
        if not self._is_shared(window):
            return window.occupied + window.queued <= 1
        if window.capacity <= window.queued or window.running > self.max_batch_size:
            return False
        has_positions = not held.is_limited or held.free > held.capacity.positions // STAY_SHARE
        return has_positions and not window.cramped and (not window.queued or bool(window.entering))

    def _is_shared(self, window: Window) -> bool:
        return self.mixes_lengths and window.max_num_seqs >= MIN_SHARED_PLACES
