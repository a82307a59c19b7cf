"""Predicted speed of a pair by batch and draft length, and what to run it with. Pure."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from coordinator.drafting.costs import RoundCosts

# A batch is large enough when it reaches this share of the highest tokens per second of any batch.
ENOUGH = 0.95


@dataclass(frozen=True)
class MeasuredPair:
    """The costs and the acceptance of a target and a draft."""

    costs: RoundCosts
    lengths: Sequence[float]
    """The mean acceptance length by draft length; 1 without draft tokens."""
    shared: bool
    """Whether both run on one device, so that only one of them works at a time."""

    def in_turn(self, batch: int, k: int) -> float:
        """Tokens per second of a batch that is drafted and verified in turn."""
        return batch * self.lengths[k] / self.costs.seconds(batch, [batch] * k)

    def in_halves(self, batch: int, k: int) -> float:
        """Tokens per second if one half of the batch is drafted while the other is verified; 0 if it cannot be."""
        if self.shared or k == 0 or batch == 1:
            return 0.0
        draft, verify = self.draft_seconds(batch / 2, k), self.verify_seconds(batch / 2, k)
        # In a period each worker serves both halves, and each half goes through both workers.
        period = max(2 * draft, 2 * verify, draft + verify + 2 * self.costs.exchange)
        return batch * self.lengths[k] / period

    def draft_seconds(self, batch: float, k: int) -> float:
        """Seconds that the draft worker spends on a round."""
        return k * self.costs.draft(batch)

    def verify_seconds(self, batch: float, k: int) -> float:
        """Seconds that the target worker spends on a round."""
        return self.costs.verify(batch * (k + 1))


@dataclass(frozen=True)
class Speed:
    """The predicted speed of a batch with a draft length."""

    batch: int
    k: int
    tokens_per_second: float
    of_plain: float
    groups: int
    """Groups in flight, whichever is faster: 1, drafted and verified in turn, or 2 halves that overlap."""


@dataclass(frozen=True)
class Workers:
    """Numbers of draft and target workers with which every target worker verifies all the time."""

    draft: int
    target: int


def predict(pair: MeasuredPair, batches: Iterable[int]) -> list[Speed]:
    """Predicts the speed of every batch, with plain decoding and with each draft length."""
    speeds = []
    for batch in batches:
        plain = pair.in_turn(batch, 0)
        for k in range(len(pair.lengths)):
            whole, halves = pair.in_turn(batch, k), pair.in_halves(batch, k)
            speed = max(whole, halves)
            speeds.append(Speed(batch, k, speed, speed / plain, 2 if halves > whole else 1))
    return speeds


def best_by_batch(speeds: Iterable[Speed]) -> dict[int, Speed]:
    """The fastest draft length of each batch; the shortest of equally fast ones."""
    best: dict[int, Speed] = {}
    for speed in speeds:
        if speed.batch not in best or speed.tokens_per_second > best[speed.batch].tokens_per_second:
            best[speed.batch] = speed
    return best


def enough(best: Iterable[Speed]) -> Speed:
    """The smallest batch that reaches 95% of the most tokens per second of any."""
    by_batch = sorted(best, key=lambda speed: speed.batch)
    most = max(speed.tokens_per_second for speed in by_batch)
    return next(speed for speed in by_batch if speed.tokens_per_second >= ENOUGH * most)


def workers(pair: MeasuredPair, batch: int, k: int) -> Workers:
    """One draft worker for as many target workers as it can draft for while they verify; if it is slower than one of
    them, as many draft workers as one target worker needs."""
    if k == 0:
        return Workers(0, 1)
    share = pair.draft_seconds(batch, k) / pair.verify_seconds(batch, k)
    if pair.shared:
        return Workers(1, 1)
    return Workers(1, math.floor(1 / share)) if share <= 1 else Workers(math.ceil(share), 1)
