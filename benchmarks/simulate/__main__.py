"""Simulate adaptive draft lengths against plain decoding and fixed lengths, by acceptance, batch size and costs.

    python -m benchmarks.simulate [--answers 12] [--costs NAME ...] [--batches N ...] [--output FOLDER]

There is no model: costs are given and acceptance is random. `--costs` and `--batches` select cells.

The first cells have constant costs, known up to a factor of 1.5. "steady" acceptance rates vary a little around the
given one. "changing" rates switch between good and bad halfway through.

The hard cells have noise: a standard deviation of 10%, and one pass in 100 takes three times as long. Costs of draft
and verification are believed up to 5 times too low or too high, or drift by a factor of 4, or one worker is 3 times
slower for a minute. "unseen": rounds that draft take longer than workers report, as on shared cores. "short" runs
begin with a new coordinator and end when two answers per place of the batch are complete.

Each row has the best fixed length in hindsight, the adaptive speed as a fraction of the best fixed speed, and both
speeds relative to plain decoding. The last line printed is JSON.
"""

import argparse
import itertools
import statistics
from collections.abc import Iterator

from benchmarks.report import finish, output_folder, parser_of, progress, show, whole
from benchmarks.simulate.cells import hard_row, row
from benchmarks.simulate.machine import CHANGING, COSTS, UNSEEN

BATCHES, RATES = (1, 4, 16, 64), (0.05, 0.3, 0.5, 0.7, 0.9)
HARD_COSTS = ("laptop", "laptop, slow draft", "two GPUs", "busy GPU", "passes of 24 rows", "one GPU")
LOADS = ((1, 0.05), (1, 0.7), (4, 0.3), (4, 0.6), (16, 0.6))
"""Batch size and acceptance rate."""
CORNERS = tuple(f"draft x{draft}, verify x{verify}" for draft in (0.2, 5) for verify in (0.2, 5))
NUM_SHOWN = 12


def main() -> None:
    parser = parser_of(__doc__, prog="python -m benchmarks.simulate")
    parser.add_argument(
        "--answers", type=whole(1, 10_000), default=12, help="answers per slot of the batch; at least 24 in total"
    )
    parser.add_argument("--costs", choices=COSTS, nargs="+", default=list(COSTS), metavar="NAME", help=", ".join(COSTS))
    parser.add_argument("--batches", type=int, choices=BATCHES, nargs="+", default=BATCHES)
    parser.add_argument("--output", type=output_folder, help="folder for the result")
    options = parser.parse_args()
    cells = list(itertools.product(options.costs, options.batches, RATES, ("steady", "changing")))
    rows = [row(*cell, answers=options.answers) for cell in progress(cells, "cells")]
    show("the cells farthest below the best fixed length", sorted(rows, key=lambda found: found["of_best"])[:NUM_SHOWN])
    worst_by_cost = {found["costs"]: found for found in sorted(rows, key=lambda found: -found["of_best"])}
    show("the worst cell of each cost", [worst_by_cost[costs] for costs in options.costs])
    hard = [hard_row(*cell) for cell in progress(list(hard_cells(options)), "hard cells")]
    show("hard cells: the slowest ones", sorted(hard, key=lambda found: found["of_plain"])[:NUM_SHOWN])
    worst_by_conditions = {
        (found["conditions"], found["length"]): found for found in sorted(hard, key=lambda found: -found["of_plain"])
    }
    show("hard cells: the slowest one of each kind", list(worst_by_conditions.values()))
    result = {
        "answers": options.answers,
        "least_of_best": min(found["of_best"] for found in rows),
        "mean_of_best": round(statistics.fmean(found["of_best"] for found in rows), 4),
        "least_of_plain": min(found["of_plain"] for found in rows + hard),
        "rows": rows,
        "hard": hard,
    }
    finish("simulate", result, options.output)


def hard_cells(options: argparse.Namespace) -> Iterator[tuple[str, int, float, str, str]]:
    """Costs, batch size, acceptance rate, conditions and length of each selected hard cell."""
    costs_of_cells = [costs for costs in HARD_COSTS if costs in options.costs]
    loads = [load for load in LOADS if load[0] in options.batches]
    for costs, (batch, rate) in itertools.product(costs_of_cells, loads):
        for conditions, length in itertools.product((*CORNERS, *UNSEEN), ("short", "long")):
            yield costs, batch, rate, conditions, length
        for conditions in CHANGING:
            yield costs, batch, rate, conditions, "long"


if __name__ == "__main__":
    main()
