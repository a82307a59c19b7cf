"""Prints the results of all parts in one short table."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from benchmarks.gpu.part import Row

Results = Mapping[str, Mapping[str, Any]]

MAX_LINES, MAX_WIDTH = 60, 160
# Lines of one list of rows, and of all failures.
ROWS, FAILURES = 6, 8
ROUND = (
    "draft", "sequences", "way", "reply_ms", "over_plain", "tokens_a_round", "prepare_ms", "target_ms", "choose_ms",
    "draft_ms", "steps_ms", "copy_ms", "launched_ms", "synced_ms", "waits",
)  # fmt: skip
"""Columns of the table of rounds."""


def print_summary(results: Results) -> None:
    """Print failures and the most telling rows of each part, in at most MAX_LINES lines."""
    lines = [*part_lines(results), *failure_lines(results), *row_lines(results)]
    for line in lines[:MAX_LINES]:
        print(line[:MAX_WIDTH])


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
    compared = [row for part in ("exactness", "mixtures", "hybrids", "round") for row in rows(part, "exactness")]
    different = [row for row in compared if not row["equal"]]
    if compared:
        yield f"exact   {len(compared) - len(different)} of {len(compared)} comparisons by bits are equal"
    yield from _lines("differs", different)
    yield from table_lines([row for row in rows("round", "rounds") if "eager" not in row["way"]], ROUND)
    yield from answer_lines(rows("pair", "runs"))
    yield from _lines("library", rows("generate", "generate"))
    yield from step_lines([*rows("mixtures", "steps"), *rows("hybrids", "steps"), *rows("steps", "steps")])
    yield from _lines("prefill", rows("hybrids", "prefills"))
    yield from _lines("draft", [*rows("hybrids", "drafts"), *rows("draft", "drafts")])
    yield from gemm_lines(rows("gemm", "gemm"))


def table_lines(rows: Sequence[Row], columns: Sequence[str]) -> Iterator[str]:
    """A table with a line of headings, in which missing values are blank."""
    headings = [name.removesuffix("_ms").replace("_", " ") for name in columns]
    cells = [["" if row.get(name) is None else str(row[name]) for name in columns] for row in rows]
    widths = [max(map(len, column)) for column in zip(headings, *cells, strict=True)]
    for line in [headings, *cells] if rows else []:
        yield "  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True))


def step_lines(rows: Iterable[Row]) -> Iterator[str]:
    """A line for each batch: milliseconds of its steps, and their shares of the limit."""
    return _grouped("step", (
        (f"{row['model']}, {row['sequences']} sequences, {row['cached']} cached",
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
    """A line for each concurrency and arrangement: tokens/s (relative to plain decoding) and time of a round."""
    return _grouped("answer", (
        (f"{row['concurrency']} at a time, {row['arrangement']}, tokens/s",
         f"{row['kind']} {row['tokens_per_s']:.1f} ({row['ratio']:.2f}, {row['round_ms']:.1f} ms)"
         f"{'' if row['exact_match'] == 1 else ' INEXACT'}")
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
