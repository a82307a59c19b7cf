"""Simulated workers: true costs, how they change over time, and the beliefs of a coordinator that starts with them."""

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from specpool.drafting.costs import RoundCosts, StepTimes

COSTS = {
    "laptop": (0.003, 0.0004, 0.019, 0.0011),
    "laptop, slow draft": (0.009, 0.0008, 0.019, 0.0011),
    "two GPUs": (0.002, 0.00001, 0.008, 0.00002),
    "two GPUs, slow draft": (0.006, 0.00001, 0.008, 0.00002),
    "busy GPU": (0.002, 0.00005, 0.008, 0.0004),
    "passes of 64 rows": (0.001, 0.00001, 0.008, 0.00002),
    "passes of 24 rows": (0.001, 0.0002, 0.008, 0.0004),
    "one GPU": (0.00125, 0.0, 0.0048, 0.000015),
    "one GPU, EAGLE head": (0.00023, 0.0, 0.0048, 0.000015),
}
"""Seconds of a draft step: first and each further sequence. Seconds of a verification: first and each further row."""
CARRIED = ("one GPU", "one GPU, EAGLE head")
"""Names of costs with a target worker that carries the draft, so that drafts take no messages."""
MAX_ROWS = {"passes of 64 rows": 64, "passes of 24 rows": 24}
"""Maximum rows of one pass of the target."""
EXCHANGE_SECONDS = 0.001
# Noise of a pass: standard deviation of the logarithm, and the chance and size of outliers.
SIGMA, OUTLIER_CHANCE, OUTLIER = 0.1, 0.01, 3.0
MEAN_NOISE = math.exp(SIGMA**2 / 2) * (1 + OUTLIER_CHANCE * (OUTLIER - 1))
# A slow worker takes three times as long for this minute. Drifting costs halve and double within this period.
SLOW, SLOW_FROM, SLOW_UNTIL = 3.0, 60.0, 120.0
DRIFT_SECONDS = 120.0

Factor = Callable[[float], float]
"""Factor of a worker's seconds at a time."""


def _constant(_: float) -> float:
    return 1.0


def _slow_minute(now: float) -> float:
    return SLOW if SLOW_FROM <= now < SLOW_UNTIL else 1.0


def _drift(now: float) -> float:
    return 2 ** math.sin(2 * math.pi * now / DRIFT_SECONDS)


def _other_drift(now: float) -> float:
    return 2 ** math.sin(2 * math.pi * now / DRIFT_SECONDS / 1.3 + 2)


@dataclass(frozen=True)
class Conditions:
    """What a coordinator gets wrong, and what changes while it runs."""

    believed: tuple[float, float] = (1.0, 1.0)
    """Believed draft and verify times, relative to true ones."""
    draft: Factor = _constant
    verify: Factor = _constant
    unseen: float = 1.0
    """Factor of the wall time of rounds that draft, which the times that workers report do not show."""


WRONG = {
    f"draft x{draft:g}, verify x{verify:g}": Conditions((draft, verify))
    for draft in (0.2, 1, 5)
    for verify in (0.2, 1, 5)
}
"""Costs believed wrong by up to five times in either direction."""
CHANGING = {
    "drift": Conditions(draft=_drift, verify=_other_drift),
    "slow draft": Conditions(draft=_slow_minute),
    "slow target": Conditions(verify=_slow_minute),
}
UNSEEN = {"unseen 20%": Conditions(unseen=1.2), "unseen 60%": Conditions(unseen=1.6)}
CONDITIONS = WRONG | CHANGING | UNSEEN


@dataclass(frozen=True)
class Spent:
    """Seconds of a round: in each worker, and until the next round."""

    draft: float
    verify: float
    wall: float


@dataclass
class Machine:
    costs: RoundCosts
    conditions: Conditions = Conditions()
    rng: random.Random | None = None
    """Generator of the noise. None: every pass takes its mean time."""
    mean: float = 1.0
    """Mean factor of the noise, without a generator."""
    now: float = 0.0
    _known: dict[tuple[int, ...], tuple[float, float]] = field(default_factory=dict)

    def run(self, sequences: int, drafting: Sequence[int]) -> Spent:
        key = sequences, *drafting
        if key not in self._known:
            verify = self.costs.verify(sequences + sum(drafting))
            self._known[key] = sum(map(self.costs.draft, drafting)), verify
        draft, verify = self._known[key]
        draft *= self.conditions.draft(self.now) * self._noise()
        verify *= self.conditions.verify(self.now) * self._noise()
        calls_draft = drafting and not self.costs.has_own_draft
        wall = draft + verify + EXCHANGE_SECONDS * (2 if calls_draft else 1)
        wall *= self.conditions.unseen if drafting else 1.0
        self.now += wall
        return Spent(draft, verify, wall)

    def _noise(self) -> float:
        if self.rng is None:
            return self.mean
        outlier = OUTLIER if self.rng.random() < OUTLIER_CHANCE else 1.0
        return outlier * math.exp(self.rng.gauss(0, SIGMA))


def true_costs(name: str) -> RoundCosts:
    """The real costs of rounds."""
    draft, draft_more, verify, verify_more = COSTS[name]
    rows, max_rows = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512), MAX_ROWS.get(name, 0)
    return RoundCosts(
        StepTimes({n: draft + draft_more * (n - 1) for n in rows}),
        StepTimes({n: verify + verify_more * (n - 1) for n in rows}, max_rows=max_rows),
        EXCHANGE_SECONDS,
        has_own_draft=name in CARRIED,
    )


def believed_costs(name: str, believed: tuple[float, float] = (1.0, 1.0), error: float = 1.5) -> RoundCosts:
    """Costs as measured at start: wrong by the given factors, and at every point by a factor of up to `error`."""
    true, rng = true_costs(name), random.Random(1)
    draft, verify = (
        StepTimes(
            {rows: factor * seconds * error ** rng.uniform(-1, 1) for rows, seconds in times.points.items()},
            max_rows=times.max_rows,
        )
        for times, factor in zip((true.draft, true.verify), believed, strict=True)
    )
    return RoundCosts(draft, verify, EXCHANGE_SECONDS, has_own_draft=name in CARRIED)
