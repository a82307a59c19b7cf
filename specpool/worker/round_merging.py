"""Decides which rounds share a forward pass.

Two half-full passes take almost as long as two full ones. So a round shares its pass with the waiting rounds of other
coordinators, and with those of its own coordinator that may join, whose sequences have just arrived. Coordinators whose
rounds were answered together send the next ones almost together, so the first of them waits briefly for the others. A
single coordinator never waits.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

SHORT_TOKENS = 64
"""A round of at most this many tokens is never too long to join another one."""
MAX_STEPS_RATIO = 2
"""Maximum passes of a round that joins, relative to the first round."""
LATENESS = 0.25
"""How long to wait for a round beyond its expected arrival, in passes."""
PASSES = 4
"""Number of recent passes, of which the shortest bounds the wait, so that one long prefill does not extend it."""
MAX_COORDINATORS = 64


class Work(NamedTuple):
    """The cost of a round. `num_tokens`: tokens of the first forward pass. `steps`: forward passes."""

    num_tokens: int
    steps: int = 1


@dataclass(eq=False)
class Round:
    """A round that waits for the model thread."""

    coordinator_id: str
    request: Any
    work: Callable[[], Work]
    """Measures the round, on the model thread."""
    response: tuple[Any, dict[str, int]] | None = None
    """The result and the timing fields of the response, once served."""

    @property
    def may_join(self) -> bool:
        """Whether the round may share a pass with an earlier round of its coordinator."""
        return getattr(self.request, "may_join", False)


class RoundMerging:
    """The rounds that wait, and when the next round of each coordinator is expected."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._waiting: list[Round] = []
        self._changed = threading.Condition()
        self._answered: dict[str, float] = {}
        """When the last pass with a coordinator's round ended."""
        self._gaps: dict[str, float] = {}
        """Seconds between a coordinator's last answer and its next round."""
        self._last: frozenset[str] = frozenset()
        """Coordinators with a round in the last pass."""
        self._seconds: deque[float] = deque(maxlen=PASSES)

    def add(self, round_: Round) -> None:
        """Queue a round, which may be served together with rounds of other coordinators."""
        with self._changed:
            answered = self._answered.pop(round_.coordinator_id, None)
            if answered is not None:
                self._gaps[round_.coordinator_id] = self._clock() - answered
            self._waiting.append(round_)
            self._changed.notify()

    def discard(self, round_: Round) -> None:
        """Forget a round unless it is being served."""
        with self._changed:
            if round_ in self._waiting:
                self._waiting.remove(round_)

    def take(self, first: Round, max_tokens: int) -> list[Round]:
        """Return this round and the rounds to serve with it, after waiting for those expected soon.

        `max_tokens`: maximum tokens of a pass.
        """
        with self._changed:
            while (seconds := self.patience(first)) > 0:
                self._changed.wait(seconds)
            taken = self._fitting(first, max_tokens)
            self._waiting = [round_ for round_ in self._waiting if round_ not in taken]
            return taken

    @contextmanager
    def serving(self, rounds: list[Round]) -> Iterator[None]:
        """Record that this context serves these rounds together."""
        began = self._clock()
        try:
            yield
        finally:
            with self._changed:
                now = self._clock()
                self._last = frozenset(round_.coordinator_id for round_ in rounds)
                if len(self._gaps) > MAX_COORDINATORS or len(self._answered) > MAX_COORDINATORS:
                    self._gaps.clear()
                    self._answered.clear()
                self._answered.update(dict.fromkeys(self._last, now))
                self._seconds.append(now - began)

    def patience(self, first: Round) -> float:
        """Return the seconds to wait for further rounds; 0: do not wait."""
        missing = self._last - {first.coordinator_id, *(round_.coordinator_id for round_ in self._waiting)}
        if not missing:
            return 0.0
        now, pass_seconds = self._clock(), min(self._seconds)
        known = missing & self._answered.keys() & self._gaps.keys()
        expected = [self._answered[name] + self._gaps[name] - now for name in known]
        # After more than one pass, this round is answered earlier without the others.
        waits = [seconds + LATENESS * pass_seconds for seconds in expected if seconds <= pass_seconds]
        return max(waits, default=0.0)

    def _fitting(self, first: Round, max_tokens: int) -> list[Round]:
        """Return the first round, one of each other coordinator, and those that may join, while all fit in one pass.

        None of them delays the first round much.
        """
        own_id = first.coordinator_id
        others = [round_ for round_ in self._waiting if round_.coordinator_id != own_id or round_.may_join]
        if not others or others == [first]:
            return [first]
        own = first.work()
        taken, num_tokens = {own_id: [first]}, own.num_tokens
        for round_ in others:
            work, together = round_.work(), taken.setdefault(round_.coordinator_id, [])
            is_long = work.num_tokens > max(SHORT_TOKENS, own.num_tokens)
            is_deep = work.steps > MAX_STEPS_RATIO * own.steps
            is_too_much = num_tokens + work.num_tokens > max_tokens
            if (together and not _may_share(round_, together)) or is_long or is_deep or is_too_much:
                continue
            together.append(round_)
            num_tokens += work.num_tokens
        return [round_ for together in taken.values() for round_ in together]


def _may_share(round_: Round, others: list[Round]) -> bool:
    """Whether a round may share a pass with other rounds of its coordinator."""
    taken = {item.sequence_id for other in others for item in other.request.items}
    return round_.may_join and taken.isdisjoint(item.sequence_id for item in round_.request.items)
