"""Drafting ahead on two devices, in virtual time. `benchmarks.simulate_ahead` describes the strategies.

Passes only take time, and acceptance is random. Sequences with the same number of draft tokens are alike, so a round
only counts them. Calls reach a device after half a round trip, and responses take the other half.
"""

import heapq
import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Literal

from benchmarks.split_devices import MAX_DRAFT_TOKENS

LENGTHS = range(1, MAX_DRAFT_TOKENS + 1)
BRANCHES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
SEARCH_SEQUENCES, FINAL_SEQUENCES, MIN_ROUNDS = 3_000, 30_000, 300
"""Sequences times rounds that a plan is tried with and measured with, and the minimum of rounds."""


@dataclass(frozen=True)
class Strategy:
    """What the draft worker does during a verification, and for sequences whose outcome has no branch."""

    ahead: Literal["nothing", "chain", "outcomes"] = "nothing"
    redraft: Literal["all", "rest", "short", "none"] = "all"
    """Which sequences draft again if some have no draft tokens. rest: only those; short: only those, in fewer steps."""
    groups: int = 1
    queued: bool = False
    """Whether the next verification waits at the target, with all branches."""


STRATEGIES = {
    "in turn": Strategy(),
    "chain": Strategy("chain"),
    "chain, rest again": Strategy("chain", "rest"),
    "chain, rest plain": Strategy("chain", "none"),
    "two groups": Strategy(groups=2),
    "outcomes, again": Strategy("outcomes", "rest"),
    "outcomes, short": Strategy("outcomes", "short"),
    "outcomes, plain": Strategy("outcomes", "none"),
    "outcomes, queued": Strategy("outcomes", "none", queued=True),
}


@dataclass(frozen=True)
class Plan:
    """The lengths that a strategy uses."""

    length: int
    """Maximum draft tokens of a sequence in a round."""
    redraft_length: int
    """Draft tokens of a sequence that drafts again."""
    branches: int = 1
    """Branches of each sequence."""


@dataclass(frozen=True)
class Pair:
    """Two models on two devices."""

    acceptance: float
    """Chance that the draft's first guess of a token is right."""
    second_guess: float
    """Chance of each further guess, if those before it are wrong."""
    verify: Callable[[int], float]
    """Seconds of the target's pass by rows."""
    draft: Callable[[int], float]
    """Seconds of a draft step by rows."""
    exchange: float = 0.0
    """Seconds of a round trip to a worker, without the pass."""

    def guess_chances(self, count: int) -> list[float]:
        """The chances of the draft's first guesses of a token, in order."""
        rest = 1 - self.acceptance
        return [self.acceptance, *(rest * self.second_guess * (1 - self.second_guess) ** i for i in range(count - 1))]


class Outcomes:
    """Outcomes of verifying a number of draft tokens. Some of them have a branch."""

    def __init__(self, pair: Pair, num_draft_tokens: int, branches: int, chain: bool) -> None:
        first, *others = pair.guess_chances(branches + 1)
        reached = [first**accepted for accepted in range(num_draft_tokens + 1)]
        full = (reached[-1] * first, num_draft_tokens)
        rejected = [(chance * other, accepted) for accepted, chance in enumerate(reached) for other in others]
        self.continued = [full] if chain else heapq.nlargest(branches, [full, *rejected])
        """Chance and number of accepted tokens of each outcome with a branch."""
        ends = [chance * (1 - first) for chance in reached[:-1]] + reached[-1:]
        covered = [sum(chance for chance, n in self.continued if n == accepted) for accepted in range(len(ends))]
        # The draft already has guesses in place of its draft tokens. A guess after the last one takes another step.
        delays = [0] * num_draft_tokens + [1]
        self._outcomes = [*enumerate(delays), *((accepted, None) for accepted in range(len(ends)))]
        chances = [*covered, *(max(0.0, end - part) for end, part in zip(ends, covered, strict=True))]
        self._cumulative = list(accumulate(chances))

    @property
    def covered(self) -> float:
        """The chance that the outcome has a branch."""
        return sum(chance for chance, _ in self.continued)

    def draw(self, rng: random.Random, count: int) -> Iterable[tuple[int, int | None]]:
        """For `count` sequences: accepted tokens, and steps by which the branch is shorter; None without a branch."""
        return rng.choices(self._outcomes, cum_weights=self._cumulative, k=count)


class Device:
    """Serves calls in order, in virtual time."""

    def __init__(self, exchange: float) -> None:
        self._free, self._exchange = 0.0, exchange

    def call(self, sent: float, seconds: float) -> float:
        """When the response to a call arrives."""
        self._free = max(self._free, sent + self._exchange / 2) + seconds
        return self._free + self._exchange / 2


class Group:
    """Sequences that share rounds. Sequences with equally many draft tokens are alike."""

    def __init__(self, size: int, pair: Pair, strategy: Strategy, plan: Plan, rng: random.Random) -> None:
        self.rounds = self.tokens = 0
        self.ended = 0.0
        """When the response of the last verification arrived."""
        self._size, self._pair, self._strategy, self._plan, self._rng = size, pair, strategy, plan, rng
        self._drafted = Counter[int]()
        """Number of sequences, by draft tokens of their branch."""
        self._outcomes: dict[int, Outcomes] = {}

    def run(self, draft: Device, target: Device) -> Iterator[float]:
        """Run rounds. Yields before each call that depends on the last one: the time at which it is sent."""
        known = sent = 0.0
        while True:
            if redrafting := self._redrafting():
                steps = self._plan.redraft_length
                known = sent = draft.call(sent, steps * self._pair.draft(redrafting))
                self._drafted[steps] += redrafting
                yield sent
            self._drafted[0] += self._size - self._drafted.total()
            seconds = self._pair.verify(sum(count * (1 + length) for length, count in self._drafted.items()))
            steps = self._ahead_steps(seconds)
            self.ended = verified = target.call(sent, seconds)
            ahead = draft.call(known, steps * self._pair.draft(self._ahead_rows)) if steps else sent
            self._commit(steps)
            known, sent = (verified, ahead) if self._strategy.queued else (max(verified, ahead),) * 2
            yield sent

    def _redrafting(self) -> int:
        """Number of sequences to draft for before the next verification."""
        rest = self._size - self._drafted.total()
        if not rest or not self._plan.redraft_length:
            return 0
        if self._strategy.redraft == "all":
            self._drafted.clear()
            return self._size
        return rest

    @property
    def _ahead_rows(self) -> int:
        return self._size * (self._plan.branches if self._strategy.ahead == "outcomes" else 1)

    def _ahead_steps(self, seconds: float) -> int:
        """Draft steps during a verification of this duration."""
        if self._strategy.ahead == "nothing":
            return 0
        # The draft learns the outcome a round trip after the target, and must send its branches a round trip early.
        seconds -= 2 * self._pair.exchange * self._strategy.queued
        fitting = int(seconds / self._pair.draft(self._ahead_rows) + 1e-9)
        return min(self._plan.length + 1, max(0, fitting))

    def _commit(self, steps: int) -> None:
        """Draw the outcomes of a round. `steps`: draft steps during its verification."""
        self.rounds += 1
        verified, self._drafted = self._drafted, Counter()
        for length, count in verified.items():
            for accepted, delay in self._outcomes_of(length).draw(self._rng, count) if count else ():
                self.tokens += accepted + 1
                if delay is not None and (ready := min(self._plan.length, steps - delay)) > 0:
                    self._drafted[ready] += 1

    def _outcomes_of(self, length: int) -> Outcomes:
        if length not in self._outcomes:
            chain = self._strategy.ahead != "outcomes"
            self._outcomes[length] = Outcomes(self._pair, length, self._plan.branches, chain)
        return self._outcomes[length]


def speed(count: int, pair: Pair, strategy: Strategy, plan: Plan, rounds: int) -> float:
    """Tokens/s of `count` sequences in this many rounds of each group."""
    rng, draft, target = random.Random(0), Device(pair.exchange), Device(pair.exchange)
    sizes = [count * (i + 1) // strategy.groups - count * i // strategy.groups for i in range(strategy.groups)]
    groups = [Group(size, pair, strategy, plan, rng) for size in sizes if size]
    waiting = [(0.0, i, group.run(draft, target)) for i, group in enumerate(groups)]
    while sum(group.rounds for group in groups) < rounds * len(groups):
        _, i, run = waiting[0]
        heapq.heapreplace(waiting, (next(run), i, run))
    return sum(group.tokens for group in groups) / max(group.ended for group in groups)


def best(count: int, pair: Pair, strategy: Strategy, max_branches: int) -> tuple[Plan, float]:
    """The best plan and its tokens/s. Changes one part of the plan at a time until no change is faster."""
    branches = min(4, max_branches) if strategy.ahead == "outcomes" else 1
    plan = Plan(4, {"none": 0, "short": 2}.get(strategy.redraft, 4), branches)
    speeds: dict[Plan, float] = {}
    previous = None
    while plan != previous:
        previous = plan
        for part in ("length", "branches", "redraft_length"):
            for changed in changes(strategy, plan, part):
                if changed not in speeds and changed.branches <= max_branches:
                    rounds = max(MIN_ROUNDS, SEARCH_SEQUENCES // count)
                    speeds[changed] = speed(count, pair, strategy, changed, rounds)
            plan = max(speeds, key=speeds.__getitem__)
    return plan, speed(count, pair, strategy, plan, max(MIN_ROUNDS, FINAL_SEQUENCES // count))


def changes(strategy: Strategy, plan: Plan, part: str) -> list[Plan]:
    """All plans that differ in one part, and the plan itself."""
    if part == "length":
        redraft = {"none": 0, "short": plan.redraft_length}
        return [Plan(n, min(n, redraft.get(strategy.redraft, n)), plan.branches) for n in LENGTHS]
    if part == "branches" and strategy.ahead == "outcomes":
        return [replace(plan, branches=branches) for branches in BRANCHES]
    if part == "redraft_length" and strategy.redraft == "short":
        return [replace(plan, redraft_length=n) for n in range(1, plan.length + 1)]
    return [plan]
