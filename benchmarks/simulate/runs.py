"""Simulated runs: answers with random acceptance, and draft lengths that are fixed or adaptive."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

from benchmarks.simulate.machine import Machine, Spent
from specpool.drafting.draft_lengths import DraftLengths, DraftOptions
from specpool.drafting.plans import NO_DRAFTS, DraftMethod

MAX_DRAFT_TOKENS = 8
ANSWER_LENGTH = 100

Rates = Callable[[random.Random, float], float]
"""The rate of a new sequence, from a generator and the progress of the run (0 to 1)."""


def steady(rate: float) -> Rates:
    """Rates around one value."""
    return lambda rng, progress: min(0.98, max(0.0, rng.gauss(rate, 0.1)))


def changing(rate: float) -> Rates:
    """Rates around one value in the first half and another in the second."""
    return lambda rng, progress: min(0.98, max(0.0, rng.gauss(rate if progress < 0.5 else 0.95 - rate, 0.1)))


@dataclass
class Answer:
    """A sequence with known acceptance."""

    number: int
    right: Sequence[int]
    """At each position, how many of the following draft tokens are right."""
    position: int = 0


class Fixed:
    def __init__(self, k: int) -> None:
        self._k = k

    def choose(self, limits: dict[int, int]) -> dict[int, int]:
        """Draft tokens of each answer, given their maximum."""
        return {number: min(self._k, limit) for number, limit in limits.items()}

    def learn(self, chosen: dict[int, int], gained: dict[int, int], drafting: Sequence[int], spent: Spent) -> None:
        """Learn nothing."""

    def forget(self, number: int) -> None:
        """Forget a finished answer."""


class Adaptive(Fixed):
    """Adaptive draft lengths, which learn from every round what a coordinator would."""

    def __init__(self, lengths: DraftLengths) -> None:
        self.lengths = lengths
        self._is_trial = False
        """Whether the last round is a trial."""

    def choose(self, limits: dict[int, int]) -> dict[int, int]:
        plans = dict.fromkeys(limits, NO_DRAFTS)
        if self.lengths.rests(len(limits)):
            self.lengths.rest({}, len(limits))
        else:
            plans = self.lengths.choose({number: DraftOptions(limit) for number, limit in limits.items()})
        self._is_trial = any(plan.is_trial for plan in plans.values())
        return {number: plan.num_draft_tokens for number, plan in plans.items()}

    def learn(self, chosen: dict[int, int], gained: dict[int, int], drafting: Sequence[int], spent: Spent) -> None:
        for number, tokens in gained.items():
            self.lengths.acceptance.add(number, chosen[number], tokens - 1)
        if drafting:
            self.lengths.costs.draft.observe_steps(drafting, spent.draft)
        self.lengths.costs.verify.observe(len(chosen) + sum(drafting), spent.verify)
        method = DraftMethod.MODEL if drafting else None
        self.lengths.ledger.observe(len(gained), sum(gained.values()), spent.wall, method, self._is_trial)

    def forget(self, number: int) -> None:
        self.lengths.acceptance.forget(number)


def drawn(rates: Rates, answers: int, seed: int = 0) -> list[Answer]:
    """Answers of random length and acceptance."""
    rng, found = random.Random(seed), []
    for number in range(answers):
        rate = rates(rng, number / answers)
        length = rng.randint(ANSWER_LENGTH // 2, 3 * ANSWER_LENGTH // 2)
        right = [rng.random() < rate for _ in range(length)]
        runs = list(accumulate(reversed(right), lambda run, is_right: is_right * (run + 1), initial=0))[1:]
        found.append(Answer(number, runs[::-1]))
    return found


def seconds_of_run(machine: Machine, batch: int, answers: list[Answer], policy: Fixed) -> float:
    began, waiting = machine.now, [Answer(one.number, one.right) for one in reversed(answers)]
    running: list[Answer] = []
    while waiting or running:
        while waiting and len(running) < batch:
            running.append(waiting.pop())
        chosen = policy.choose(
            {one.number: min(MAX_DRAFT_TOKENS, len(one.right) - one.position - 1) for one in running}
        )
        drafting = [sum(k > j for k in chosen.values()) for j in range(max(chosen.values()))]
        spent, gained = machine.run(len(running), drafting), {}
        for one in running:
            gained[one.number] = min(chosen[one.number], one.right[one.position]) + 1
            one.position += gained[one.number]
        policy.learn(chosen, gained, drafting, spent)
        for one in running:
            if one.position >= len(one.right):
                policy.forget(one.number)
        running = [one for one in running if one.position < len(one.right)]
    return machine.now - began
