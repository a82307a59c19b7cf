"""Plans branches: how many outcomes of a verification to draft for while it runs, and how many tokens each. Pure.

Branches cost no time unless they take longer than the verification. A sequence whose outcome has no branch is verified
without model drafts in the next round, so that no sequence waits for the drafts of another.
"""

from dataclasses import dataclass

from specpool.drafting.acceptance import Acceptance, expected_tokens
from specpool.drafting.costs import RoundCosts
from specpool.drafting.sequences import Commit

NUMBERS = (1, 2, 3, 4, 6, 8)
"""Numbers of branches to choose from."""
FIRST_HIT = 0.5
"""Initial chance that the first branch matches the outcome. Each further chance is this share of the one before."""


@dataclass(frozen=True)
class BranchPlan:
    """The branches of the next rounds."""

    num_branches: int = 0
    length: int = 0
    """Draft tokens of a branch."""
    speed: float = 0.0
    """Expected tokens per second."""
    row: float = 0.0
    """Cost of verifying one more token, in tokens that the same time would gain otherwise."""


class Branching:
    """Plans branches, and learns how often they match the outcome."""

    def __init__(self, costs: RoundCosts) -> None:
        self._costs = costs
        self._hits = [Acceptance() for _ in range(max(NUMBERS))]
        """Hit rates by rank."""

    def observe(self, commit: Commit) -> None:
        """Learn which branch matched the outcome, if any were drafted."""
        for rank in range(min(commit.num_branches, len(self._hits))):
            self._hits[rank].add(1, int(rank == commit.branch))

    def coverage(self, num_branches: int) -> float:
        """Chance that one of this many branches matches the outcome."""
        rates = (hits.rate(FIRST_HIT ** (rank + 1)) for rank, hits in enumerate(self._hits[:num_branches]))
        return min(1.0, sum(rates))

    def best(self, sequences: int, drafting: int, rate: float, max_branches: int, lengths: range) -> BranchPlan:
        """The fastest plan for a round of `sequences`, of which `drafting` have branches.

        `rate`: acceptance rate of their draft tokens. `lengths`: possible draft tokens of a branch.
        """
        best = BranchPlan()
        for num_branches in NUMBERS:
            if num_branches > max_branches or not drafting:
                break
            previous = 0.0
            for length in lengths:  # the speed has a single peak
                plan = self._plan(sequences, drafting, rate, num_branches, length)
                best = max(best, plan, key=lambda each: each.speed)
                if plan.speed < previous:
                    break
                previous = plan.speed
        return best

    def seconds(self, sequences: int, drafting: int, num_branches: int, length: int) -> float:
        """Expected seconds of a round."""
        costs, drafted = self._costs, drafting * self.coverage(num_branches) * length
        verify = costs.verify(sequences + drafted)
        draft = costs.draft(drafting + drafted) + length * costs.draft(drafting * num_branches)
        if costs.ahead_exchange is not None:
            waiting = costs.exchange if costs.plain_exchange is None else costs.plain_exchange
            return max(verify + waiting, draft + costs.ahead_exchange + costs.exchange)
        # The draft worker is called after the target worker.
        return max(verify, draft + costs.scheduling) + costs.exchange + costs.scheduling

    def _plan(self, sequences: int, drafting: int, rate: float, num_branches: int, length: int) -> BranchPlan:
        covered, verify = drafting * self.coverage(num_branches), self._costs.verify
        tokens = sequences + covered * (expected_tokens(rate, length) - 1)
        speed = tokens / self.seconds(sequences, drafting, num_branches, length)
        row = speed * (verify(sequences + covered * length) - verify(sequences)) / (covered * length)
        return BranchPlan(num_branches, length, speed, row)
