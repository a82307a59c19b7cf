"""Recommends which kind of worker to add behind a coordinator. Pure.

Targets divide the sequences, and drafts the drafting. With fewer drafts than targets, a draft serves several targets in
turn; with more, several share a target's sequences.
"""

from dataclasses import dataclass
from itertools import product

from specpool.planning.prediction import MeasuredPair

WORTHWHILE = 1.05
"""Minimum speed-up of a recommended worker."""


@dataclass(frozen=True)
class FleetSpeed:
    """Predicted speed of several workers, each on its own device."""

    targets: int
    drafts: int
    k: int
    """Draft tokens of a sequence in a round."""
    tokens_per_second: float
    target_busy: float
    """Fraction of time that a target spends in its model."""
    draft_busy: float

    @property
    def bottleneck(self) -> str:
        """The busier kind of worker, or the messages if both mostly wait for messages."""
        busy = {
            "target": self.target_busy,
            "draft": self.draft_busy,
            "messages": 1 - self.target_busy - self.draft_busy,
        }
        return max(busy, key=lambda name: busy[name])


@dataclass(frozen=True)
class NextWorker:
    """The gain from one more worker of either kind."""

    concurrency: int
    """Concurrent requests."""
    now: FleetSpeed
    add_target: FleetSpeed
    add_draft: FleetSpeed

    def gain(self, speed: FleetSpeed) -> float:
        """Speed relative to now."""
        return speed.tokens_per_second / self.now.tokens_per_second

    @property
    def best(self) -> str | None:
        """The kind of worker to add; None if neither is worthwhile."""
        gains = {"target": self.gain(self.add_target), "draft": self.gain(self.add_draft)}
        kind = max(gains, key=lambda name: gains[name])
        return kind if gains[kind] >= WORTHWHILE else None


def next_worker(pair: MeasuredPair, targets: int, drafts: int, concurrency: int, capacity: int) -> NextWorker:
    """Compare one more target with one more draft. `capacity`: sequences that fit in the KV cache of a target."""
    now, add_target, add_draft = (
        fleet_speed(pair, targets + more[0], drafts + more[1], min(concurrency, capacity * (targets + more[0])))
        for more in ((0, 0), (1, 0), (0, 1))
    )
    return NextWorker(concurrency, now, add_target, add_draft)


def fleet_speed(pair: MeasuredPair, targets: int, drafts: int, running: int) -> FleetSpeed:
    """Return the speed of this many running sequences with the best number of draft tokens."""
    lengths, batch = range(len(pair.lengths)), running / min(targets, running)
    choices = [(k, groups) for k, groups in product(lengths, (1, 2)) if groups == 1 or (k > 0 and batch >= groups)]
    return max(
        (_speed(pair, targets, drafts, running, k, groups) for k, groups in choices),
        key=lambda speed: speed.tokens_per_second,
    )


def _speed(pair: MeasuredPair, targets: int, drafts: int, running: int, k: int, groups: int) -> FleetSpeed:
    """Return the speed if each target has `groups` groups in flight."""
    used = min(targets, running)
    group = running / used / groups
    verify = pair.verify_seconds(group, k)
    draft = pair.draft_seconds(group * min(1, used / drafts), k)
    target_time, draft_time = groups * verify, groups * draft * max(1, used / drafts)
    round_trip = draft + verify + (2 if k else 1) * pair.costs.exchange
    period = max(target_time, draft_time, round_trip)
    return FleetSpeed(targets, drafts, k, running * pair.lengths[k] / period, target_time / period, draft_time / period)
