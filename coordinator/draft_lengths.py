"""How many tokens to draft for each sequence of a round: as many as gain the most tokens per second. Pure.

A draft token is worth the chance that it and all before it are accepted; it costs a share of a draft step and a row of
the verification. Nobody drafts where none of it pays.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import accumulate, repeat, takewhile
from operator import mul

from coordinator.costs import RoundCosts

# Acceptance rates are told apart in so many steps: few enough that sequences alike are counted, not looked at.
STEPS = 32
# What a sequence, and what all of them have shown fades by such a factor with every draft token; a sequence begins as
# with so many tokens like all others'.
FADING, FADING_OF_ALL, PRIOR_TOKENS = 0.985, 0.995, 10.0
# Another plan must promise so much more before it replaces the last one.
HYSTERESIS = 0.02
# Where nobody drafts, the share of the time that may be lost by trying whether that is still right, and the share of a
# trial's time that counts as lost at least, however much it is expected to gain.
PROBING_COST, LEAST_LOSS = 0.01, 0.1


@dataclass
class Acceptance:
    """The rate at which draft tokens are accepted, lately."""

    fading: float = FADING
    accepted: float = 0.0
    tried: float = 0.0

    def add(self, drafted: int, accepted: int) -> None:
        """Takes in a round. Behind the first token that was rejected, nothing was tried."""
        tried = min(drafted, accepted + 1)
        fading = self.fading**tried
        self.accepted = self.accepted * fading + accepted
        self.tried = self.tried * fading + tried

    def rate(self, prior: float) -> float:
        """Estimated, beginning with `prior`."""
        return (self.accepted + PRIOR_TOKENS * prior) / (self.tried + PRIOR_TOKENS)


@dataclass
class DraftLengths:
    """Chooses draft lengths, and learns from what became of them."""

    costs: RoundCosts
    longest: int
    """Draft tokens of a sequence, at most."""
    first_rate: float = 0.6
    """Believed of a draft that was never tried."""
    _all: Acceptance = field(default_factory=lambda: Acceptance(FADING_OF_ALL))
    _sequences: dict[int, Acceptance] = field(default_factory=dict)
    _plan: dict[int, int] = field(default_factory=dict)
    """Draft length by step of the acceptance rate."""
    _saved: float = 0.0
    """Seconds that probing may cost."""

    def choose(self, limits: Mapping[int, int]) -> dict[int, int]:
        """Draft tokens for each sequence id; `limits`: the most that each can use."""
        steps = {sequence_id: self._step(sequence_id) for sequence_id in limits}
        counts: dict[int, int] = {}
        for sequence_id, step in steps.items():
            if limits[sequence_id] > 0:
                counts[step] = counts.get(step, 0) + 1
        self._plan = self._best(counts, len(limits))
        chosen = {i: min(limit, self._plan.get(steps[i], 0)) for i, limit in limits.items()}
        if counts and not any(chosen.values()):
            self._probe(chosen, limits)
        return chosen

    def observe(self, sequence_id: int, drafted: int, accepted: int) -> None:
        """Takes in what became of a sequence's draft tokens."""
        if drafted:
            self._all.add(drafted, accepted)
            self._sequences.setdefault(sequence_id, Acceptance()).add(drafted, accepted)

    def forget(self, sequence_id: int) -> None:
        """A sequence has ended."""
        self._sequences.pop(sequence_id, None)

    def rate(self, sequence_id: int) -> float:
        """The acceptance rate that is expected of a sequence."""
        prior = self._all.rate(self.first_rate)
        return self._sequences.get(sequence_id, Acceptance()).rate(prior)

    def _step(self, sequence_id: int) -> int:
        return min(STEPS - 1, int(self.rate(sequence_id) * STEPS))

    def _best(self, counts: dict[int, int], sequences: int) -> dict[int, int]:
        """Draft length by step of the acceptance rate, for so many sequences of each."""
        last = {step: self._plan.get(step, 0) for step in counts}
        best, promised = last, self._speed(last, counts, sequences) * (1 + HYSTERESIS)
        for depth in range(self.longest + 1):
            plan = self._at_depth(depth, counts, sequences)
            speed = self._speed(plan, counts, sequences)
            if speed > promised:
                best, promised = plan, speed
        return best

    def _at_depth(self, depth: int, counts: dict[int, int], sequences: int) -> dict[int, int]:
        """The best plan of at most so many draft steps: whoever's token is worth its costs takes part in a step."""
        plan = dict.fromkeys(counts, depth)
        for _ in range(3):  # the speed decides what a second is worth, and that decides the plan
            speed = self._speed(plan, counts, sequences)
            rows = sequences + sum(counts[step] * k for step, k in plan.items())
            row_cost = self.costs.verify(rows + 1) - self.costs.verify(rows)
            drafting = self._drafting(plan, counts, depth)
            # Where others draft too, one sequence more costs little; alone it would cost the whole step.
            shares = [self.costs.draft(n) - self.costs.draft(n - 1) if n > 1 else 0.0 for n in drafting]
            for step in counts:
                worth = accumulate(repeat(_middle(step), depth), mul)
                pays = (value >= speed * (row_cost + share) for value, share in zip(worth, shares, strict=True))
                plan[step] = sum(takewhile(bool, pays))
        return plan

    def _speed(self, plan: Mapping[int, int], counts: Mapping[int, int], sequences: int) -> float:
        """Tokens per second that are to be expected."""
        gained = sum(counts[step] * (expected_tokens(_middle(step), k) - 1) for step, k in plan.items())
        drafting = self._drafting(plan, counts, max(plan.values(), default=0))
        return (sequences + gained) / self.costs.seconds(sequences, drafting)

    def _drafting(self, plan: Mapping[int, int], counts: Mapping[int, int], depth: int) -> list[int]:
        """Sequences that take part in each draft step."""
        return [sum(counts[step] for step, k in plan.items() if k > j) for j in range(depth)]

    def _probe(self, chosen: dict[int, int], limits: Mapping[int, int]) -> None:
        """Now and then drafts one token for everybody, so that what changed is noticed: nearly as cheap as for one."""
        able = [sequence_id for sequence_id, limit in limits.items() if limit > 0]
        plain = self.costs.seconds(len(limits), [])
        lost = self.costs.seconds(len(limits), [len(able)]) - plain
        gained = sum(map(self.rate, able)) * plain / len(limits)
        self._saved += PROBING_COST * plain
        if self._saved >= max(lost - gained, LEAST_LOSS * lost):
            self._saved = 0.0
            chosen.update(dict.fromkeys(able, 1))


def expected_tokens(rate: float, k: int) -> float:
    """Tokens gained in a round with k draft tokens."""
    return 1.0 + float(sum(accumulate(repeat(rate, k), mul)))


def _middle(step: int) -> float:
    return (step + 0.5) / STEPS
