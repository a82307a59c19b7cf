"""Turns of coordinators that compete for slots.

Rounds of different coordinators share a pass only if they wait at the same time. If each coordinator holds half of the
slots, up to twice as many passes generate the same tokens. So one coordinator at a time starts sequences, and keeps its
turn for a while. Turns never end a running sequence. Pure: without a clock.
"""

from dataclasses import dataclass, field

# A turn lasts for at least this long, and until the coordinator has started one sequence per slot.
TURN_SECONDS = 2.0
# A coordinator that neither starts nor ends a sequence for this long loses its turn.
IDLE_SECONDS = 0.25
# A coordinator that has not asked again for this long no longer waits.
WAITING_SECONDS = 1.0


@dataclass
class Turns:
    """Whose turn it is. Times are in seconds of any monotonic clock."""

    slots: int
    _owner: str = ""
    _began: float = 0.0
    _active: float = 0.0
    _started: int = 0
    """Sequences that the owner has started during its turn."""
    _waiting: dict[str, float] = field(default_factory=dict)
    """When coordinators without a slot last asked, longest waiting first."""

    def admits(self, coordinator: str, now: float) -> bool:
        """Whether a coordinator may start a sequence if a slot is free. Everybody may if nobody waits."""
        self._waiting = {name: asked for name, asked in self._waiting.items() if now - asked <= WAITING_SECONDS}
        if not self._waiting.keys() - {self._owner}:
            return True
        if now - self._active > IDLE_SECONDS or self._is_over(now):
            longest = next(name for name in self._waiting if name != self._owner)
            self._begin(longest, now)
        return coordinator == self._owner

    def started(self, coordinator: str, now: float) -> None:
        """Record that a coordinator has started a sequence."""
        self._waiting.pop(coordinator, None)
        if coordinator != self._owner:
            self._begin(coordinator, now)
        self._started += 1
        self._active = now

    def refused(self, coordinator: str, now: float) -> None:
        """Record that a coordinator has not got a slot."""
        self._waiting[coordinator] = now

    def ended(self, coordinator: str, now: float) -> None:
        """Record that a sequence has freed its slot."""
        if coordinator == self._owner:
            self._active = now

    def _is_over(self, now: float) -> bool:
        return self._started >= self.slots and now - self._began >= TURN_SECONDS

    def _begin(self, coordinator: str, now: float) -> None:
        self._owner, self._began, self._active, self._started = coordinator, now, now, 0
