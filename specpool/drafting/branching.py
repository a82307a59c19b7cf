"""Plans branches: how many outcomes of a verification to draft for while it runs, and how many tokens each. Pure.

Branches cost no time unless they take longer than the verification. A sequence whose outcome has no branch is verified
without model drafts in the next round, so that no sequence waits for the drafts of another.
"""

from dataclasses import dataclass

from specpool.drafting.acceptance import FIRST_RATE, Acceptance, expected_tokens
from specpool.drafting.costs import RoundCosts
from specpool.drafting.sequences import Commit
from specpool.protocol.rounds import MAX_ITEM_BRANCHES


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
        self._hits = [Acceptance() for _ in range(MAX_ITEM_BRANCHES)]
        """Hit rates by rank. At first, each branch takes the same share of what the ones before it leave."""

    def observe(self, commit: Commit) -> None:
        """Learn which branch matched the outcome, if any were drafted."""
        for rank in range(min(commit.num_branches, len(self._hits))):
            self._hits[rank].add(1, int(rank == commit.branch))

    def coverage(self, num_branches: int) -> float:
        """Chance that one of this many branches matches the outcome."""
        hits = enumerate(self._hits[:num_branches])
        return min(1.0, sum(each.rate(FIRST_RATE * (1 - FIRST_RATE) ** rank) for rank, each in hits))

    def best(self, sequences: int, drafting: int, rate: float, max_branches: int, lengths: range) -> BranchPlan:
        """The fastest plan for a round of `sequences`, of which `drafting` have branches.

        `rate`: acceptance rate of their draft tokens. `lengths`: possible draft tokens of a branch.
        """
        best = BranchPlan()
        for num_branches in range(1, 1 + min(max_branches, MAX_ITEM_BRANCHES) * (drafting > 0)):
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
