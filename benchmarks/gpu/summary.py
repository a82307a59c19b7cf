"""Judges the results of all parts, and prints them in one short table."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from benchmarks.gpu.part import Row

Results = Mapping[str, Mapping[str, Any]]

MAX_LINES, WIDTH = 60, 130
# Lines for one list of rows, and for all failures.
ROWS, FAILURES = 7, 8


def print_summary(results: Results) -> None:
    """Print goals, failures, and the most telling rows of each part, in at most MAX_LINES lines."""
    lines = [*goal_lines(results), *part_lines(results), *failure_lines(results), *row_lines(results)]
    for line in lines[:MAX_LINES]:
        print(line[:WIDTH])


def goal_lines(results: Results) -> Iterator[str]:
    """A line for each goal."""
    marks = {True: "met", False: "MISSED", None: "not measured"}
    for goal in goals(results):
        measured = "" if goal["measured"] is None else goal["measured"]
        yield f"goal  {goal['goal']:44} {goal['target']:>7} {measured:>7} {marks[goal['met']]}"


def part_lines(results: Results) -> Iterator[str]:
    """The outcome of each part, several to a line."""
    outcomes = []
    for name, result in results.items():
        status = result.get("error") or ("skipped" if "skipped" in result else "done")
        outcomes.append(f"{name}: {status}" + (f" ({result['seconds']:.0f} s)" if "seconds" in result else ""))
    for first in range(0, len(outcomes), 4):
        yield "parts " + "; ".join(outcomes[first : first + 4])


def failure_lines(results: Results) -> list[str]:
    """Failed measurements, and checks of kernels that found a difference."""
    failed = [
        f"FAIL  {name}: {row['failed']}: {row['error']}"
        for name, part in results.items()
        for row in part.get("failed", ())
    ]
    checks = [row for part in results.values() for row in part.get("kernels", ())]
    wrong = [
        f"WRONG {row['kernel']}, {row['case']}: error {row['error']}, differs {row['differs']}"
        for row in checks if not row["same_bits"] or row["near"] is False
    ]  # fmt: skip
    lines = [*failed, *wrong]
    more = [f"FAIL  and {len(lines) - FAILURES} more"] if len(lines) > FAILURES else []
    good = [f"kernels: {len(checks) - len(wrong)} of {len(checks)} checks passed"] if checks else []
    return [*good, *lines[:FAILURES], *more]


def row_lines(results: Results) -> Iterator[str]:
    """The most telling rows, by part."""
    facts = results.get("preflight", {})
    names = ("name", "torch", "triton", "captures", "captures_after_failure", "read_gb_s", "copy_gb_s", "gemm_tflops")
    yield from _lines("preflight", [{name: facts[name] for name in names if name in facts}] if facts else [])
    for name in results.keys() & {"exactness"}:
        yield from _lines(
            name, [{key: fact for key, fact in results[name].items() if isinstance(fact, str | int | float)}]
        )
    steps = [row for row in results.get("steps", {}).get("steps", ()) if row["backend"] == "chosen"]
    yield from _lines("step", _columns(steps, "cached", "rows", "captured", "passes", "ms", "limit_ms", "of_limit"), 12)
    gemms = results.get("gemm", {}).get("gemm", ())
    yield from _lines("gemm", _without(gemms, "outputs", "inputs", "differs", "error", "as_triton"), 20)
    yield from _lines("draft", results.get("draft", {}).get("drafts", ()), 6)
    yield from _lines("answer", _columns(results.get("pair", {}).get("runs", ()), "concurrency", "kind", "tokens_per_s",
                                         "ratio", "exact_match"), 12)  # fmt: skip
    yield from _lines("transformers", results.get("transformers", {}).get("runs", ()))
    profile = [row for row in results.get("profile", {}).get("names", ()) if row["how"] == "captured"]
    yield from _lines("kernel", _columns(profile, "rows", "share", "times", "us_each", "name"))
    yield from _lines("tile", best_tiles(results.get("sweep", {}).get("gemm", ())), 20)
    yield from _lines("warps", results.get("sweep", {}).get("attention", ()))


def best_tiles(rows: Iterable[Row]) -> list[Row]:
    """The fastest tile of each GEMM and row count, beside the chosen one."""
    times: dict[tuple[str, str], list[tuple[float, str, bool]]] = {}
    for row in rows:
        for name in row:
            if name.startswith("us_of_"):
                times.setdefault((row["gemm"], name), []).append((row[name], row["tile"], row["same_bits"]))
    best = []
    for (gemm, name), cases in times.items():
        chosen = next((us for us, tile, _ in cases if tile == "chosen"), None)
        us, tile, same_bits = min(cases)
        best.append({"gemm": gemm, "rows": int(name.removeprefix("us_of_")), "chosen_us": chosen, "best_us": us,
                     "tile": tile, "same_bits": same_bits})  # fmt: skip
    return best


def goals(results: Results) -> list[Row]:
    """Compare the worst measured cases with what a GPU of the H200 class should reach."""
    steps = [row for row in results.get("steps", {}).get("steps", ()) if row["backend"] == "chosen"]
    drafts = results.get("draft", {}).get("drafts", ())
    runs = results.get("pair", {}).get("runs", ())

    def of_steps(what: str, sequences: int, drafted: bool) -> list[float]:
        return [row[what] for row in steps if (row["sequences"], row["drafted"] > 0) == (sequences, drafted)]

    def goal(name: str, values: Iterable[float | None], at_least: float = -math.inf, at_most: float = math.inf) -> Row:
        known = [value for value in values if value is not None]
        worst: Callable[..., float | None] = min if math.isfinite(at_least) else max
        measured = worst(known, default=None)
        met = None if measured is None else at_least <= measured <= at_most
        target = f">= {at_least:g}" if math.isfinite(at_least) else f"<= {at_most:g}"
        return {"goal": name, "target": target, "measured": measured, "met": met}

    speedups = [row["ratio"] for row in runs if (row["kind"], row["concurrency"]) == ("adaptive", 8)]
    draft_ms = [row["ms"] for row in drafts if row["sequences"] == 8]
    return [
        goal("share of the limit, step of 1", of_steps("of_limit", 1, False), at_least=0.7),
        goal("share of the limit, step of 8", of_steps("of_limit", 8, False), at_least=0.7),
        goal("verification of 8 x 5 rows, of a plain step", of_steps("over_plain", 8, True), at_most=1.1),
        goal("passes of 64 x 5 rows", of_steps("passes", 64, True), at_most=1),
        goal("draft of 4 tokens for 8, ms", draft_ms, at_most=4),
        goal("adaptive of plain, 8 at a time", speedups, at_least=2),
        goal("exact match", [row["exact_match"] for row in runs], at_least=1),
    ]


def _lines(title: str, rows: Iterable[Row], maximum: int = ROWS) -> list[str]:
    return [f"{title:5} {' '.join(f'{name}={value}' for name, value in row.items())}" for row in rows][:maximum]


def _columns(rows: Iterable[Row], *names: str) -> list[Row]:
    return [{name: row.get(name) for name in names} for row in rows]


def _without(rows: Iterable[Row], *names: str) -> list[Row]:
    return [{name: value for name, value in row.items() if name not in names} for row in rows]
