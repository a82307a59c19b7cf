"""Shares of worker time: which clients sit out a round because others have had too little time. Pure, without a clock.

Each of n clients with work may count on the speed that it would have with the workers to itself for 1/n of the time. As
batches take less time than their parts, all clients usually run together and exceed this speed. A client falls behind
if the rows of others cost far more than its own: many rows, sampling rules, log-probabilities. The expensive clients
then sit out rounds until it has caught up.
"""

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass

# Bounds of a client's lag, in longest recent rounds: a short memory reacts quickly to a change of the load.
MAX_LAG, MAX_LEAD = 4.0, 1.0
# A client that comes back starts behind by up to this many longest recent rounds, earned at its share while it was
# idle. A short request then hardly waits for expensive clients, and pauses between requests do not pay for long ones.
IDLE_CREDIT = 2.0
# Share of the longest recent round that is left after another one.
DECAY = 0.95
# A round counts as at most this many times the longest recent one, so that a stalled pass is soon forgotten.
MAX_RISE = 4.0
# A client that is not behind joins a round if that adds at most this share of the round's time.
JOIN_SHARE = 0.25


@dataclass
class Part:
    """A client's part in a round."""

    rows: int = 0
    costly_rows: int = 0
    """Rows that are sampled, or whose log-probabilities are reported."""


@dataclass(frozen=True)
class Cost:
    """Seconds of a client's part in its last round."""

    alone: float = 0.0
    """Of a round with nothing else."""
    added: float = 0.0
    """That it adds to a round of others."""


class WorkerTime:
    """How far each client is behind its share, in seconds."""

    def __init__(self) -> None:
        self._lags: dict[str, float] = {}
        """By client. A client that is missing has been idle long enough for the whole credit."""
        self._costs: dict[str, Cost] = {}
        self._longest = 0.0
        """Seconds of the longest recent round."""

    def add_round(
        self, parts: Mapping[str, Part], seconds: float, pass_seconds: Callable[[float], float], active: Collection[str]
    ) -> None:
        """Count a round of `seconds`, in the model. `active`: clients that had work for it, by name.

        `pass_seconds`: seconds of a pass without costly rows by its rows. What a round takes beyond that is due to its
        costly rows.
        """
        rows = sum(part.rows for part in parts.values())
        seconds = min(seconds, MAX_RISE * max(self._longest, pass_seconds(rows)))
        costs = _costs(parts, seconds, pass_seconds)
        self._costs = {name: cost for name, cost in (self._costs | costs).items() if name in active}
        self._longest = max(seconds, DECAY * self._longest)
        idle = self._idle_lags(active, seconds)
        sharers = max(2, len(active))  # a client alone spends its credit, too
        self._lags = idle | {
            name: min(MAX_LAG * self._longest, max(-MAX_LEAD * self._longest, self._lag(name) + change))
            for name in active
            for change in [seconds / sharers - (costs[name].alone if name in costs else 0.0)]
        }

    def may_run(self, clients: Iterable[str]) -> set[str]:
        """Return which of these clients may join the next round: at least one."""
        waiting = sorted(clients, key=lambda name: -self._lag(name))
        behind = {name for name in waiting if self._lag(name) > 0}
        if not behind:
            return set(waiting)
        costs = [self._costs.get(name, Cost()) for name in behind]
        seconds = max(cost.alone - cost.added for cost in costs) + sum(cost.added for cost in costs)
        joining = set(behind)
        for name in waiting[len(behind) :]:
            added = self._costs.get(name, Cost()).added
            if added <= JOIN_SHARE * seconds:
                joining.add(name)
                seconds += added
        return joining

    def _lag(self, name: str) -> float:
        return self._lags.get(name, IDLE_CREDIT * self._longest)

    def _idle_lags(self, active: Collection[str], seconds: float) -> dict[str, float]:
        """Lags of idle clients after a round, without those that have earned the whole credit."""
        credit, share = IDLE_CREDIT * self._longest, seconds / (len(active) + 1)
        lags = {name: lag + share for name, lag in self._lags.items() if name not in active}
        return {name: lag for name, lag in lags.items() if lag < credit}


def _costs(parts: Mapping[str, Part], seconds: float, pass_seconds: Callable[[float], float]) -> dict[str, Cost]:
    rows, costly = sum(part.rows for part in parts.values()), sum(part.costly_rows for part in parts.values())
    plain = pass_seconds(rows)
    extra = max(0.0, seconds - plain) if costly else 0.0
    scale = (seconds - extra) / plain if plain else 0.0
    costs = {}
    for name, part in parts.items():
        own = extra * part.costly_rows / costly if costly else 0.0
        added = scale * (pass_seconds(part.rows + 1) - pass_seconds(1)) + own
        costs[name] = Cost(alone=scale * pass_seconds(part.rows) + own, added=added)
    return costs
