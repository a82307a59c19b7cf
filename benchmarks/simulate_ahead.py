"""Simulate ways to draft ahead on two devices, and compare them with a target that never waits.

    python -m benchmarks.simulate_ahead [--sequences 1,2,4,8,16,64] [--acceptance 0.75] [--second-guess 0.5]
        [--wire-ms 0 0.5 1 2] [--verify-ms 6 0.03] [--draft-ms 0.8 0.01] [--max-branches 32]
        [--output FOLDER]

There are no models: passes take virtual time, and acceptance is random. The draft's first guess of a token is right
with probability `--acceptance`. If all guesses so far are wrong, the next one is right with probability
`--second-guess`. An outcome of a verification is the number of accepted tokens and the target's token after them.

in turn           draft, then verify
chain             During a verification, the draft continues one outcome: full acceptance, then its own next guess.
                  If that is the outcome of every sequence, verify at once. Otherwise draft again for all.
chain, rest again The same, but only sequences with another outcome draft again, while all wait.
chain, rest plain The same, but the next round verifies these sequences without drafts, so that no sequence waits.
two groups        One half of the sequences drafts while the other half is verified.
outcomes, again   During a verification, the draft continues the most probable outcomes of each sequence: each one has
                  a branch, a row of the same draft steps. Sequences without a matching branch draft again, while all
                  wait.
outcomes, short   The same, but they draft again for fewer steps.
outcomes, plain   The same, but the next round verifies them without drafts, so that no sequence waits.
outcomes, queued  The same, but the target gets all branches during its pass and picks the matching ones itself.

Each strategy uses its best draft lengths and number of branches. The result compares its speed with three others:
"of_bound" with drafts of the best length that take no time, "of_in_turn" with drafts in turn, and "of_plain" with
plain decoding. In the first and the last, the target never waits between passes.
"""

import argparse
from dataclasses import asdict
from typing import Any

from matplotlib.figure import Figure

from benchmarks.ahead import BRANCHES, STRATEGIES, Pair, best
from benchmarks.emulated_worker import SLOTS, pass_seconds
from benchmarks.report import (
    PassMs,
    chance,
    finish,
    milliseconds,
    output_folder,
    parser_of,
    progress,
    show,
    whole,
    wholes,
)
from benchmarks.split_devices import bound

WIRE_MS = (0.0, 0.5, 1.0, 2.0)


def rows_of(count: int, wire_ms: float, options: argparse.Namespace) -> list[dict[str, Any]]:
    """One cell: a row for each strategy."""
    times = pass_seconds(*options.verify_ms), pass_seconds(*options.draft_ms)
    pair = Pair(options.acceptance, options.second_guess, *times, wire_ms / 1000)
    found = {name: best(count, pair, strategy, options.max_branches) for name, strategy in STRATEGIES.items()}
    in_turn = found["in turn"][1]
    return [
        {
            "sequences": count, "wire_ms": wire_ms, "strategy": name, "tokens_per_s": round(tokens, 1),
            "of_bound": round(tokens / bound(count, None, options), 3), "of_in_turn": round(tokens / in_turn, 3),
            "of_plain": round(tokens / bound(count, 0, options), 3), **asdict(plan),
        }
        for name, (plan, tokens) in found.items()
    ]  # fmt: skip


def main() -> None:
    """Parse the command line and run the simulation."""
    parser = parser_of(__doc__)
    parser.add_argument("--sequences", type=wholes(1, SLOTS), default=[1, 2, 4, 8, 16, 64])
    parser.add_argument("--acceptance", type=chance, default=0.75)
    parser.add_argument("--second-guess", type=chance, default=0.5)
    parser.add_argument(
        "--wire-ms", type=milliseconds, nargs="+", default=WIRE_MS, metavar="MS", help="of a round trip to a worker"
    )
    parser.add_argument("--verify-ms", action=PassMs, default=(6.0, 0.03))
    parser.add_argument("--draft-ms", action=PassMs, default=(0.8, 0.01))
    parser.add_argument("--max-branches", type=whole(1, max(BRANCHES)), default=max(BRANCHES), help="of a sequence")
    parser.add_argument("--output", type=output_folder, help="folder for the result and the plot")
    options = parser.parse_args()
    cells = [(count, wire_ms) for wire_ms in options.wire_ms for count in options.sequences]
    rows = [row for cell in progress(cells, "cells") for row in rows_of(*cell, options)]
    for measure in ("of_bound", "of_in_turn", "of_plain"):
        show(f"{measure}, by ms of a round trip and sequences".replace("_", " "), table_of(rows, measure))
    finish("simulate_ahead", {**vars(options), "output": None, "rows": rows}, options.output, figure_of(rows))


def table_of(rows: list[dict[str, Any]], measure: str) -> list[dict[str, Any]]:
    """A row for each cell, with a column for each strategy."""
    cells: dict[tuple[float, int], dict[str, Any]] = {}
    for row in rows:
        cell = cells.setdefault((row["wire_ms"], row["sequences"]), {"ms": row["wire_ms"], "n": row["sequences"]})
        cell[row["strategy"]] = f"{row[measure]:.2f}"
    return list(cells.values())


def figure_of(rows: list[dict[str, Any]]) -> Figure:
    """Shares of the bound by sequences, for each wire time."""
    wires = list(dict.fromkeys(row["wire_ms"] for row in rows))
    figure = Figure(figsize=(1 + 3.2 * len(wires), 3.8), layout="constrained")
    for axes, wire_ms in zip(figure.subplots(1, len(wires), squeeze=False)[0], wires, strict=True):
        for name in STRATEGIES:
            selected = [row for row in rows if (row["wire_ms"], row["strategy"]) == (wire_ms, name)]
            counts = [row["sequences"] for row in selected]
            axes.plot(counts, [row["of_bound"] for row in selected], "o-", label=name)
        axes.set(title=f"{wire_ms:g} ms a round trip", xscale="log", xlabel="sequences", ylabel="share of the bound")
        axes.set_xticks(counts, labels=map(str, counts))
        axes.set_ylim(0, 1)
        axes.minorticks_off()
    axes.legend(fontsize="x-small")
    return figure


if __name__ == "__main__":
    main()
