"""Admission to a window: who enters next, and who is preempted to make room. Pure.

Paused sequences are preempted first, then sequences of clients with more than their share of the places or pages.
"""

from collections.abc import Iterable
from functools import partial
from itertools import chain, islice

from coordinator.scheduling.preemption import longest_of_largest, own_victim, victims_for
from coordinator.scheduling.request_queue import RequestQueue
from coordinator.scheduling.sequence import Sequence
from coordinator.scheduling.window import Window

# Sequences that may overtake one that does not fit in the KV cache yet, because they need less room.
MAX_OVERTAKEN = 16
# No more sequences enter at once after this many tokens: other clients wait meanwhile.
MAX_ADMITTED_TOKENS = 65_536
# A cached prefix decides between windows unless their shares of used places differ by more than this.
MAX_IMBALANCE = 0.25


class Admission:
    """Admits sequences of a queue to one of its windows."""

    def __init__(self, queue: RequestQueue, window: Window) -> None:
        self._queue, self._window, self._waiting = queue, window, queue.waiting

    def admit(self, limit: int | None = None) -> list[Sequence]:
        """Move at most `limit` queued sequences into the window while they fit.

        Sequences that have a better place in another open window enter that one. Return all that have entered. Long
        prompts enter over several calls.
        """
        self._window.settle()
        if self._window.preempts:
            self._make_places()
            self._make_room()
        else:
            self._end_standstill()
        if not self._waiting:
            return []
        rooms = self._rooms(self._window.capacity if limit is None else min(limit, self._window.capacity))
        admitted, tokens = list[Sequence](), 0
        while self._window in rooms and self._waiting:
            sequence, fitting = self._next_fitting(rooms)
            if sequence is None:
                break
            window = _choose(sequence, fitting)
            window.enter(sequence)
            if window is not self._window:
                window.wake()
            rooms[window] -= 1
            if not rooms[window]:
                del rooms[window]
            admitted.append(sequence)
            tokens += len(sequence.token_ids)
            if tokens > MAX_ADMITTED_TOKENS:
                break
        return admitted

    def _rooms(self, limit: int) -> dict[Window, int]:
        """How many sequences each open window may admit, if any; at most `limit` for this one."""
        rooms = {
            window: limit if window is self._window else min(window.capacity, window.admission_limit())
            for window in self._queue.windows
            if window.is_open
        }
        return {window: room for window, room in rooms.items() if room > 0 and not window.cramped}

    def _next_fitting(self, rooms: Iterable[Window]) -> tuple[Sequence | None, list[Window]]:
        """The waiting sequence that enters next, and the windows with room for it.

        Shorter sequences may overtake, but only so often.
        """
        first: Sequence | None = None
        for sequence in self._queue.candidates(rooms, MAX_OVERTAKEN):
            first = first or sequence
            if fitting := [window for window in rooms if self._fits(sequence, window)]:
                first.overtaken += sequence is not first
                return sequence, fitting
        return None, []

    def _fits(self, sequence: Sequence, window: Window) -> bool:
        """Whether a waiting sequence may enter a window, and there is room for it."""
        return bool(window.count_fitting([sequence])) and self._queue.may_enter(sequence, window)

    def _make_places(self) -> None:
        """Preempt paused sequences, longest paused first, and sequences of clients above their share of places."""
        window = self._window
        coming = self._queue.coming
        for sequence in list(islice(window.paused.values(), max(0, len(self._waiting) - coming))):
            window.preempt(sequence)
            coming += 1
        members = partial(chain, window.parked.values(), window.ready)
        for sequence in self._waiting.slot_victims(members(), coming, self._would_fit):
            window.preempt(sequence)
            coming += 1
        if self._waiting and not coming:
            victim = self._waiting.request_victim(members(), self._would_fit)
            if victim is not None:
                window.preempt(victim)

    def _would_fit(self, sequence: Sequence, victims: Iterable[Sequence]) -> bool:
        """Whether a waiting sequence could enter once these victims have left, if it gets a place."""
        held, first = self._window.pages, self._waiting.next
        if sequence is not first and first.overtaken >= MAX_OVERTAKEN:
            return False
        if not self._queue.may_enter(sequence, self._window):
            return False
        coming = sum(held[sequence_id] for sequence_id in self._window.leaving_ids)
        coming += sum(held[victim.sequence_id] for victim in victims)
        return not held.is_limited or held.needed_by(sequence) <= held.free + coming

    def _make_room(self) -> None:
        """Preempt sequences whose pages others need more."""
        window = self._window
        if not window.pages.is_limited:
            return
        for sequence in window.cramped.values():
            if self._claim(sequence, window.pages.missing(sequence), is_inside=True):
                return
        if self._end_standstill():
            return
        if self._waiting and window.coming and not (window.cramped and window.leaving_ids):
            others = [other for other in self._queue.windows if other is not window and other.is_open]
            for sequence in islice(self._queue.candidates([window], MAX_OVERTAKEN), MAX_OVERTAKEN):
                if any(self._fits(sequence, other) for other in others):
                    return
                if self._claim(sequence, window.pages.needed_by(sequence), is_inside=False):
                    return

    def _end_standstill(self) -> bool:
        """Preempt a sequence if all wait for pages. Return whether they did."""
        window = self._window
        if not window.cramped or window.ready or window.open_rounds or window.leaving_ids or window.occupied < 2:
            return False
        window.preempt(longest_of_largest(window.members, window.pages))
        return True

    def _claim(self, claimant: Sequence, wanted: int, is_inside: bool) -> bool:
        """Preempt sequences until a sequence gets `wanted` more pages. Return whether it will."""
        window, held, missing = self._window, self._window.pages, wanted
        if is_inside or not window.cramped:  # otherwise cramped sequences get what is free
            missing -= held.free + sum(held[sequence_id] for sequence_id in window.leaving_ids)
        for sequence in list(window.paused.values()):
            if missing > 0:
                missing -= held[sequence.sequence_id]
                window.preempt(sequence)
        if missing <= 0:
            return True
        members = list(window.members)
        victims = victims_for(claimant, wanted, missing, members, window.leaving_ids, held)
        if not victims and not is_inside and not self._waiting.has_place(claimant):
            own = own_victim(claimant, wanted, missing, members, held)
            victims = [own] if own is not None else []
        for victim in victims:
            window.preempt(victim)
        return bool(victims)


def _choose(sequence: Sequence, windows: list[Window]) -> Window:
    """The best of some windows with room: the one with the longest cached prefix, or the least load."""
    if len(windows) == 1:
        return windows[0]
    least = min(window.load for window in windows)
    balanced = [window for window in windows if window.load <= least + MAX_IMBALANCE]
    return max(balanced, key=lambda window: (window.prefix_length(sequence), -window.load))
