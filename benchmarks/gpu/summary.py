"""Judges the results of all parts, and prints them in one short table."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from benchmarks.gpu.part import Row

Results = Mapping[str, Mapping[str, Any]]

MAX_LINES, MAX_WIDTH = 60, 160
# Lines of one list of rows, and of all failures.
ROWS, FAILURES = 6, 8


def print_summary(results: Results) -> None:
    """Print goals, failures, and the most telling rows of each part, in at most MAX_LINES lines."""
    lines = [*goal_lines(results), *part_lines(results), *failure_lines(results), *row_lines(results)]
    for line in lines[:MAX_LINES]:
        print(line[:MAX_WIDTH])


# --- Lines


def goal_lines(results: Results) -> Iterator[str]:
    """A line for each goal."""
    marks = {True: "met", False: "MISSED", None: "not measured"}
    for goal in goals(results):
        measured = "" if goal["measured"] is None else goal["measured"]
        yield f"goal    {goal['goal']:44} {goal['target']:>7} {measured:>7} {marks[goal['met']]}"


def part_lines(results: Results) -> Iterator[str]:
    """The outcome of each part, several to a line."""
    outcomes = []
    for name, result in results.items():
        status = result.get("error") or ("skipped" if "skipped" in result else "done")
        left_out = f", {len(result['left_out'])} left out" if "left_out" in result else ""
        outcomes.append(f"{name}: {status}{left_out}, {result.get('seconds', 0):.0f} s")
    for first in range(0, len(outcomes), 4):
        yield "parts   " + "; ".join(outcomes[first : first + 4])


def failure_lines(results: Results) -> list[str]:
    """Failed measurements, and checks of kernels that found a difference."""
    failed = [
        f"FAILED  {name}: {row['failed']}: {row['error']}"
        for name, part in results.items() for row in part.get("failed", ())
    ]  # fmt: skip
    checks = [row for part in results.values() for row in part.get("kernels", ())]
    wrong = [
        f"WRONG   {row['kernel']}, {row['case']}: error {row['error']}, differs {row['differs']}"
        for row in checks if not row["same_bits"] or row["near"] is False
    ]  # fmt: skip
    lines = [*wrong, *failed]
    more = [f"FAILED  and {len(lines) - FAILURES} more"] if len(lines) > FAILURES else []
    passed = [f"checks  {len(checks) - len(wrong)} of {len(checks)} kernels passed"] if checks else []
    return [*passed, *lines[:FAILURES], *more]


def row_lines(results: Results) -> Iterator[str]:
    """The most telling rows of each part, most important first."""

    def rows(part: str, name: str) -> list[Row]:
        found: list[Row] = results.get(part, {}).get(name, [])
        return found

    facts = results.get("preflight", {})
    names = ("name", "torch", "triton", "captures", "captures_after_failure", "read_gb_s", "copy_gb_s", "gemm_tflops")
    yield from _lines("machine", [facts] if facts else [], names)
    compared = rows("exactness", "exactness")
    different = [row for row in compared if not row["equal"]]
    if compared:
        yield f"exact   {len(compared) - len(different)} of {len(compared)} comparisons by bits are equal"
    yield from _lines("differs", different)
    yield from step_lines(rows("steps", "steps"))
    yield from gemm_lines(rows("gemm", "gemm"))
    yield from _lines("draft", rows("draft", "drafts"))
    yield from answer_lines(rows("pair", "runs"))
    yield from _lines("peer", rows("transformers", "runs"))


def step_lines(rows: Iterable[Row]) -> Iterator[str]:
    """A line for each batch: milliseconds of its steps, and their shares of the limit."""
    return _grouped("step", (
        (f"{row['sequences']} sequences, {row['cached']} cached",
         f"{row['rows']} rows {row['ms']} ms, {row['of_limit']} of the limit{'' if row['captured'] else ', EAGER'}")
        for row in rows
    ))  # fmt: skip


def gemm_lines(rows: Iterable[Row]) -> Iterator[str]:
    """A line for each shape: whether each backend is exact, and its microseconds by row count."""
    return _grouped("gemm", (
        (f"{row['gemm']}, us", " ".join((
            row["backend"], "exact" if row["exact"] else "INEXACT", *([] if row["near"] else ["WRONG"]),
            *([] if row["as_triton"] else ["OTHER BITS"]), *(str(us) for _, us in _times(row)),
        )))
        for row in rows
    ))  # fmt: skip


def answer_lines(rows: Iterable[Row]) -> Iterator[str]:
    """A line for each concurrency: tokens/s of each kind, and relative to plain decoding."""
    return _grouped("answer", (
        (f"{row['concurrency']} at a time, tokens/s",
         f"{row['kind']} {row['tokens_per_s']} ({row['ratio']}){'' if row['exact_match'] == 1 else ' INEXACT'}")
        for row in rows
    ))  # fmt: skip


def _times(row: Row) -> list[tuple[int, float]]:
    return [(int(name.removeprefix("us_of_")), us) for name, us in row.items() if name.startswith("us_of_")]


def _lines(title: str, rows: Iterable[Mapping[str, Any]], names: Iterable[str] | None = None) -> list[str]:
    shown = [{name: row[name] for name in names or row if name in row} for row in rows]
    return [f"{title:7} {' '.join(f'{name}={value}' for name, value in row.items())}" for row in shown][:ROWS]


def _grouped(title: str, texts: Iterable[tuple[str, str]]) -> Iterator[str]:
    """A line for each group of texts."""
    groups: dict[str, list[str]] = {}
    for group, text in texts:
        groups.setdefault(group, []).append(text)
    for group, own in groups.items():
        yield f"{title:7} {group}: {'; '.join(own)}"


# --- Goals


def goals(results: Results) -> list[Row]:
    """Compare the worst measured cases with what a GPU of the H200 class should reach."""
    steps = results.get("steps", {}).get("steps", ())
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
    compared = [float(row["equal"]) for row in results.get("exactness", {}).get("exactness", ())]
    return [
        goal("passes equal bit for bit", compared, at_least=1),
        goal("share of the limit, step of 1", of_steps("of_limit", 1, False), at_least=0.7),
        goal("share of the limit, step of 8", of_steps("of_limit", 8, False), at_least=0.7),
        goal("verification of 8 x 5 rows, of a plain step", of_steps("over_plain", 8, True), at_most=1.1),
        goal("passes of 64 x 5 rows", of_steps("passes", 64, True), at_most=1),
        goal("draft of 4 tokens for 8, ms", draft_ms, at_most=4),
        goal("adaptive of plain, 8 at a time", speedups, at_least=2),
        goal("exact match", [row["exact_match"] for row in runs], at_least=1),
    ]
