"""Simulate adaptive draft lengths against the best fixed length in hindsight, by acceptance, batch size and costs.

    python -m benchmarks.simulate [--answers 12] [--output FOLDER]

There is no model: costs are given and acceptance is random. "steady" rates vary a little around the given one.
"changing" rates switch between good and bad halfway through. Each row has the best fixed length, the adaptive
speed as a fraction of the best fixed speed, and both speeds relative to plain decoding. The last line printed is JSON.
"""

import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from benchmarks.report import finish, output_folder, parser_of, progress, show, whole
from coordinator.drafting.costs import RoundCosts, StepTimes
from coordinator.drafting.draft_lengths import DraftLengths, DraftOptions

MAX_DRAFT_TOKENS = 8
BATCHES, RATES = (1, 4, 16, 64), (0.05, 0.3, 0.5, 0.7, 0.9)
COSTS = {
    "laptop": (0.003, 0.0004, 0.019, 0.0011),
    "laptop, slow draft": (0.009, 0.0008, 0.019, 0.0011),
    "two GPUs": (0.002, 0.00001, 0.008, 0.00002),
    "two GPUs, slow draft": (0.006, 0.00001, 0.008, 0.00002),
    "busy GPU": (0.002, 0.00005, 0.008, 0.0004),
    "passes of 64 rows": (0.001, 0.00001, 0.008, 0.00002),
    "passes of 24 rows": (0.001, 0.0002, 0.008, 0.0004),
}
"""Seconds of a draft step: first and each further sequence. Seconds of a verification: first and each further row."""
MAX_ROWS = {"passes of 64 rows": 64, "passes of 24 rows": 24}
"""Maximum rows of one pass of the target."""
EXCHANGE_SECONDS = 0.001
ANSWER_LENGTH = 100

Rates = Callable[[random.Random, float], float]
"""The rate of a new sequence, from a generator and the progress of the run (0 to 1)."""


@dataclass
class Simulated:
    """A sequence with known acceptance."""

    number: int
    right: list[bool]
    """Whether the draft is right about each token of the answer."""
    position: int = 0


def main() -> None:
    """Parse the command line and run the simulation."""
    parser = parser_of(__doc__)
    parser.add_argument(
        "--answers", type=whole(1, 10_000), default=12, help="answers per slot of the batch; at least 24 in total"
    )
    parser.add_argument("--output", type=output_folder, help="folder for the result")
    options = parser.parse_args()
    cells = list(itertools.product(COSTS, BATCHES, RATES, ("steady", "changing")))
    rows = [row(*cell, answers=options.answers) for cell in progress(cells, "cells")]
    worst = sorted(rows, key=lambda found: found["of_best"])[:12]
    show("the worst cells", worst)
    worst_by_cost = {found["costs"]: found for found in sorted(rows, key=lambda found: -found["of_best"])}
    show("the worst cell of each cost", [worst_by_cost[costs] for costs in COSTS])
    finish("simulate", {"answers": options.answers, "rows": rows}, options.output)


def row(costs: str, batch: int, rate: float, kind: str, answers: int) -> dict[str, Any]:
    """One cell: the speed of adaptive lengths beside the best fixed length and plain decoding."""
    rates, answers = changing(rate) if kind == "changing" else steady(rate), max(24, answers * batch)
    fixed = [speed_of_fixed(costs, batch, rates, k, answers) for k in range(MAX_DRAFT_TOKENS + 1)]
    adaptive = speed_of_adaptive(costs, batch, rates, answers)
    best = max(range(MAX_DRAFT_TOKENS + 1), key=fixed.__getitem__)
    return {
        "costs": costs, "batch": batch, "rate": rate, "kind": kind, "best_k": best,
        "of_best": round(adaptive / fixed[best], 3), "of_plain": round(adaptive / fixed[0], 2),
        "best_of_plain": round(fixed[best] / fixed[0], 2),
    }  # fmt: skip


def steady(rate: float) -> Rates:
    """Rates around one value."""
    return lambda rng, progress: min(0.98, max(0.0, rng.gauss(rate, 0.1)))


def changing(rate: float) -> Rates:
    """Rates around one value in the first half and another in the second."""
    return lambda rng, progress: min(0.98, max(0.0, rng.gauss(rate if progress < 0.5 else 0.95 - rate, 0.1)))


def true_costs(name: str) -> RoundCosts:
    """The real costs of rounds."""
    draft, draft_more, verify, verify_more = COSTS[name]
    rows, max_rows = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512), MAX_ROWS.get(name, 0)
    return RoundCosts(
        StepTimes({n: draft + draft_more * (n - 1) for n in rows}),
        StepTimes({n: verify + verify_more * (n - 1) for n in rows}, max_rows=max_rows),
        EXCHANGE_SECONDS,
    )


def speed_of_fixed(costs: str, batch: int, rates: Rates, k: int, answers: int) -> float:
    """Tokens per second with a fixed draft length."""
    return simulate(true_costs(costs), batch, rates, answers, lambda limits: {i: min(k, m) for i, m in limits.items()})


def speed_of_adaptive(costs: str, batch: int, rates: Rates, answers: int) -> float:
    """Tokens per second with adaptive draft lengths. Every measured cost is wrong by a factor of up to 1.5."""
    true, rng = true_costs(costs), random.Random(1)
    draft, verify = (
        StepTimes(
            {rows: seconds * 1.5 ** rng.uniform(-1, 1) for rows, seconds in times.points.items()},
            max_rows=times.max_rows,
        )
        for times in (true.draft, true.verify)
    )
    lengths = DraftLengths(RoundCosts(draft, verify, EXCHANGE_SECONDS), MAX_DRAFT_TOKENS)

    def choose(limits: dict[int, int]) -> dict[int, int]:
        chosen = lengths.choose({number: DraftOptions(limit) for number, limit in limits.items()})
        return {number: order.num_draft_tokens for number, order in chosen.items()}

    return simulate(true, batch, rates, answers, choose, lengths)


def simulate(
    costs: RoundCosts,
    batch: int,
    rates: Rates,
    answers: int,
    choose: Callable[[dict[int, int]], dict[int, int]],
    learner: DraftLengths | None = None,
) -> float:
    """Tokens per second until all answers are complete; new sequences replace finished ones.

    Acceptance does not depend on `choose`.
    """
    rng = random.Random(0)
    waiting = [drawn(rng, number, rates(rng, number / answers)) for number in range(answers)]
    tokens, seconds = sum(len(one.right) for one in waiting), 0.0
    waiting.reverse()
    running: list[Simulated] = []
    while waiting or running:
        while waiting and len(running) < batch:
            running.append(waiting.pop())
        chosen = choose({one.number: min(MAX_DRAFT_TOKENS, len(one.right) - one.position - 1) for one in running})
        drafting = [sum(k > j for k in chosen.values()) for j in range(max(chosen.values()))]
        seconds += costs.seconds(len(running), drafting)
        for one in running:
            k, accepted = chosen[one.number], 0
            while accepted < k and one.right[one.position + accepted]:
                accepted += 1
            one.position += accepted + 1
            if learner is not None:
                learner.acceptance.add(one.number, k, accepted)
                if one.position >= len(one.right):
                    learner.acceptance.forget(one.number)
        if learner is not None:
            for count in filter(None, drafting):
                learner.costs.draft.observe(count, costs.draft(count))
            rows = len(running) + sum(drafting)
            learner.costs.verify.observe(rows, costs.verify(rows))
        running = [one for one in running if one.position < len(one.right)]
    return tokens / seconds


def drawn(rng: random.Random, number: int, rate: float) -> Simulated:
    """A sequence of random length and acceptance."""
    length = rng.randint(ANSWER_LENGTH // 2, 3 * ANSWER_LENGTH // 2)
    return Simulated(number, [rng.random() < rate for _ in range(length)])


if __name__ == "__main__":
    main()
