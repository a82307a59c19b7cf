"""Cells of the simulation: the speed of adaptive draft lengths beside fixed lengths and plain decoding."""

import random
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from typing import Any

from benchmarks.simulate.machine import (
    CHANGING,
    CONDITIONS,
    MEAN_NOISE,
    Conditions,
    Machine,
    believed_costs,
    true_costs,
)
from benchmarks.simulate.runs import (
    ANSWER_LENGTH,
    MAX_DRAFT_TOKENS,
    Adaptive,
    Answer,
    Fixed,
    changing,
    drawn,
    seconds_of_run,
    steady,
)
from specpool.drafting.draft_lengths import DraftLengths

# Draft lengths compared under hard conditions.
SOME_LENGTHS = (0, 1, 2, 4, 8)
# Seconds of plain decoding of a long run, and under changing conditions.
LONG_SECONDS, CHANGING_SECONDS = 40.0, 240.0
# A cell of short runs has at least this many runs, and answers.
MIN_REPEATS, SHORT_ANSWERS = 8, 40


def row(costs: str, batch: int, rate: float, kind: str, answers: int) -> dict[str, Any]:
    """One cell with constant costs, all of them believed wrong by a factor of up to 1.5."""
    rates, count = changing(rate) if kind == "changing" else steady(rate), max(24, answers * batch)
    todo = drawn(rates, count)
    fixed = {k: seconds_of_run(Machine(true_costs(costs)), batch, todo, Fixed(k)) for k in range(MAX_DRAFT_TOKENS + 1)}
    lengths = DraftLengths(believed_costs(costs), MAX_DRAFT_TOKENS)
    adaptive = seconds_of_run(Machine(true_costs(costs)), batch, todo, Adaptive(lengths))
    return {"costs": costs, "batch": batch, "rate": rate, "kind": kind} | _compared(adaptive, fixed)


def hard_row(costs: str, batch: int, rate: float, conditions: str, length: str) -> dict[str, Any]:
    """One cell with noise, and with wrong beliefs or changing costs.

    `length`: "long" is a run of minutes under changing conditions, otherwise of `LONG_SECONDS`. "short" repeats a run
    of two answers per place of the batch, from the first round of a new coordinator until the last answer thins out.
    """
    true = CONDITIONS[conditions]
    load = Load(costs, batch, rate, *_size(costs, batch, conditions, length))
    adaptive = 0.0
    for seed in range(load.repeats):
        lengths = DraftLengths(believed_costs(costs, true.believed), MAX_DRAFT_TOKENS)
        machine = Machine(true_costs(costs), true, random.Random(seed))
        adaptive += seconds_of_run(machine, batch, load.drawn(seed), Adaptive(lengths))
    cell = {"costs": costs, "batch": batch, "rate": rate, "conditions": conditions, "length": length}
    return cell | _compared(adaptive, _fixed_seconds(load, replace(true, believed=(1.0, 1.0))))


@dataclass(frozen=True)
class Load:
    costs: str
    batch: int
    rate: float
    answers: int
    repeats: int

    def drawn(self, seed: int) -> list[Answer]:
        return drawn(steady(self.rate), self.answers, seed)


def _size(costs: str, batch: int, conditions: str, length: str) -> tuple[int, int]:
    """Answers per run and number of runs."""
    if length == "short":
        return 2 * batch, max(MIN_REPEATS, SHORT_ANSWERS // batch)
    seconds = CHANGING_SECONDS if conditions in CHANGING else LONG_SECONDS
    return round(seconds / true_costs(costs).seconds(batch, []) * batch / ANSWER_LENGTH), 1


@cache
def _fixed_seconds(load: Load, conditions: Conditions) -> dict[int, float]:
    """Mean seconds of fixed draft lengths. Beliefs do not matter to them."""
    seconds = dict.fromkeys(SOME_LENGTHS, 0.0)
    for seed, k in product(range(load.repeats), SOME_LENGTHS):
        machine = Machine(true_costs(load.costs), conditions, mean=MEAN_NOISE)
        seconds[k] += seconds_of_run(machine, load.batch, load.drawn(seed), Fixed(k))
    return seconds


def _compared(adaptive: float, fixed: dict[int, float]) -> dict[str, Any]:
    best = min(fixed, key=fixed.__getitem__)
    return {
        "best_k": best,
        "of_best": round(fixed[best] / adaptive, 3),
        "of_plain": round(fixed[0] / adaptive, 3),
        "best_of_plain": round(fixed[0] / fixed[best], 3),
    }
