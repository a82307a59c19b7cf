"""Plans how many tokens a round drafts before its verification. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass

from specpool.drafting.acceptance import expected_tokens, rate_of
from specpool.drafting.costs import RoundCosts
from specpool.drafting.ledger import MIN_GAIN

# Minimum gain of a new plan over the current one: estimates are off by a few per cent.
HYSTERESIS = MIN_GAIN / 2


@dataclass(frozen=True)
class RoundPlan:
    """Plan for the next rounds. Costs are expressed in tokens that the same time would gain otherwise."""

    sequences: int = 0
    speed: float = 0.0
    """Expected tokens per second."""
    row: float = 0.0
    """Cost of verifying one more token, used as `min_chance`."""
    steps: tuple[float, ...] = ()
    """Cost of each draft step for one more sequence, without the verification row."""
    shares: tuple[float, ...] = ()
    """Cost of each draft step, divided equally among its sequences."""


@dataclass(frozen=True)
class Batch:
    """Planning inputs: the sequences of a round, by acceptance rate."""

    costs: RoundCosts
    sequences: int
    counts: Mapping[int, int]
    """Sequences that the model could draft for, by bin of their acceptance rate."""
    num_lookup_tokens: int
    lookup_gain: float
    """Expected tokens gained by prompt lookup."""

    def best(self, num_steps: int, max_steps: int) -> RoundPlan:
        """The fastest plan of at most `max_steps` draft steps. `num_steps`: of the current plan, which has an edge."""

        def replaces(other: RoundPlan, best: RoundPlan) -> bool:
            return other.speed > best.speed * (1 + HYSTERESIS * (len(best.steps) == num_steps))

        plain, at = self.plan(0), min(num_steps, max_steps)
        best = self.plan(at)
        for direction in (-1, 1):  # the speed has a single peak for each number of passes
            while 0 <= at + direction <= max_steps and self.counts:
                other = self.plan(at + direction)
                if not replaces(other, best):
                    break
                best, at = other, at + direction
        for filling in self._steps_filling_passes():
            if filling <= max_steps and replaces(other := self.plan(filling), best):
                best = other
        return best if best.speed > plain.speed * (1 + (0.0 if num_steps else MIN_GAIN)) else plain

    def plan(self, max_steps: int) -> RoundPlan:
        """The best plan of at most `max_steps` draft steps. A sequence leaves once a step no longer pays off for it."""
        costs, lengths = self.costs, dict.fromkeys(self.counts, max_steps)
        for _ in range(3):  # speed and participation depend on each other
            speed, drafting = self._speed(lengths), self._drafting(lengths, max_steps)
            # The average: a single row could cost a whole pass or tile that the other rows fill.
            drafted = max(1, self.num_lookup_tokens + sum(drafting))
            row = speed * (costs.verify(self.sequences + drafted) - costs.verify(self.sequences)) / drafted
            # The marginal cost of a sequence: alone, it would cost the whole step.
            steps = [speed * (costs.draft(n) - costs.draft(n - 1)) if n > 1 else 0.0 for n in drafting]
            lengths = {rate: profitable_length(rate_of(rate), [row + step for step in steps]) for rate in lengths}
        num_steps = max(lengths.values(), default=0)
        shares = [speed * costs.draft(n) / n for n in self._drafting(lengths, num_steps)]
        return RoundPlan(self.sequences, self._speed(lengths), row, tuple(steps[:num_steps]), tuple(shares))

    def _steps_filling_passes(self) -> set[int]:
        """Numbers of draft steps that fill the passes of plain decoding, or one pass more."""
        max_rows, drafting = self.costs.verify.max_rows, sum(self.counts.values())
        if not max_rows or not drafting:
            return set()
        room = -(self.sequences + self.num_lookup_tokens) % max_rows
        return {room // drafting, (room + max_rows) // drafting}

    def _speed(self, lengths: Mapping[int, int]) -> float:
        """Expected tokens per second."""
        gained = sum(self.counts[rate] * (expected_tokens(rate_of(rate), k) - 1) for rate, k in lengths.items())
        drafting = self._drafting(lengths, max(lengths.values(), default=0))
        seconds = self.costs.seconds(self.sequences, drafting, self.num_lookup_tokens)
        return (self.sequences + self.lookup_gain + gained) / seconds

    def _drafting(self, lengths: Mapping[int, int], num_steps: int) -> list[int]:
        """Sequences that take part in each draft step."""
        return [sum(self.counts[rate] for rate, k in lengths.items() if k > j) for j in range(num_steps)]


def profitable_length(rate: float, min_chances: list[float]) -> int:
    """Number of draft tokens worth their cost. `min_chances`: minimum acceptance probability of each."""
    length, chance = 0, rate
    while length < len(min_chances) and chance >= min_chances[length]:
        length, chance = length + 1, chance * rate
    return length
