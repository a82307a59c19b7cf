"""What `benchmarks.gpu` shows: tables for each part, and its goals beside what was measured."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from benchmarks.gpu.part import Row
from benchmarks.report import show
from specpool.engine.passes.gpu.gemm import KINDS

Results = Mapping[str, Mapping[str, Any]]
# Names of kernels that are shown, their letters, and numbers of a list.
NAMES, LETTERS, LISTED = 8, 70, 6
LEFT_OUT = ("outputs", "inputs", "parts", "error")
OF_A_RUN = (
    "concurrency", "kind", "tokens_per_s", "ratio", "ratio_min", "acceptance_length", "token_p50_ms", "draft_busy",
    "verify_busy", "predicted_ratio", "exact_match",
)  # fmt: skip


def show_part(name: str, results: Results) -> None:
    """The tables of a part; the facts that are no list of rows are the first one."""
    result = results[name]
    facts = {key: value for key, value in result.items() if isinstance(value, str | int | float | bool)}
    show(name, [{"fact": key, "value": value} for key, value in facts.items()])
    for title, rows in tables(name, results):
        show(f"{name}: {title}", rows)
    show(f"{name}: notes", [{"note": note} for note in result.get("notes", ())])
    for title in ("failed", "left_out"):
        show(f"{name}: {title.replace('_', ' ')}", result.get(title, ()))


def tables(name: str, results: Results) -> Iterator[tuple[str, Sequence[Row]]]:
    """Titles and rows of the tables of a part."""
    result = results[name]
    if name == "kernels":
        yield "against float64, and alone against together", by_kernel(result.get("kernels", ()))
        yield (
            "products",
            [
                {**{key: its for key, its in row.items() if key not in LEFT_OUT}, "differs": few(row["differs"])}
                for row in result.get("products", ())
            ],
        )
    elif name == "target":
        yield "chosen products", [{"product": its, "kind": kind} for its, kind in result.get("products", {}).items()]
        yield "steps", by_shape(result.get("steps", ()))
    elif name == "draft":
        yield "drafts", result.get("drafts", ())
    elif name == "pair":
        yield "answers", [{column: row[column] for column in OF_A_RUN} for row in result.get("runs", ())]
    elif name == "transformers":
        plain = {its["concurrency"]: its["tokens_per_s"] for its in runs_of(results, "plain")}
        yield "generate", [{**row, "specpool_plain": plain.get(row["sequences"])} for row in result.get("runs", ())]
    elif name == "profile":
        yield "steps", result.get("steps", ())
        for step in result.get("steps", ()):
            if step["how"] == result["steps"][0]["how"]:
                its = [row for row in result["names"] if (row["rows"], row["how"]) == (step["rows"], step["how"])]
                shown = ("times", "us", "us_each", "share")
                rows = [{"name": row["name"][:LETTERS], **{key: row[key] for key in shown}} for row in its[:NAMES]]
                yield f"{step['rows']} rows, {step['how']}", rows


def by_kernel(rows: Iterable[Row]) -> list[Row]:
    """A row for each kernel: its largest error, and where bits differ."""
    found: dict[str, list[Row]] = {}
    for row in rows:
        found.setdefault(row["kernel"], []).append(row)
    return [
        {
            "kernel": name, "cases": len(its), "largest error": f"{max(row['error'] or 0 for row in its):.2g}",
            "near": all(row["near"] is not False for row in its), "same bits": all(row["same_bits"] for row in its),
            "differs": few([f"{row['case']}: {few(row['differs'])}" for row in its if row["differs"]]),
        }
        for name, its in found.items()
    ]  # fmt: skip


def few(things: Sequence[Any]) -> str:
    """The first of a list, and how many there are if those are not all."""
    rest = f", ... ({len(things)})" if len(things) > LISTED else ""
    return ", ".join(map(str, things[:LISTED])) + rest


def by_shape(rows: Iterable[Row]) -> list[Row]:
    """A row for each shape of a step: that of the chosen products, with the times of each kind beside it."""
    found: dict[tuple[int, int, int], dict[str, Row]] = {}
    for row in rows:
        found.setdefault((row["cached"], row["sequences"], row["drafted"]), {})[row["products"]] = row
    table = []
    for its in found.values():
        chosen = {key: value for key, value in its["chosen"].items() if key != "products"}
        table.append({**chosen, **{f"{kind}_ms": its[kind]["ms"] for kind in KINDS if kind in its}})
    return table


def runs_of(results: Results, kind: str | None = None) -> list[Row]:
    """The rows of the pair's answers, of one kind of decoding or all."""
    return [row for row in results.get("pair", {}).get("runs", ()) if kind in (None, row["kind"])]


def goals(results: Results) -> list[Row]:
    """What a GPU of the kind that the goals are for should reach, in the worst of the cases that were measured."""
    steps = [row for row in results.get("target", {}).get("steps", ()) if row["products"] == "chosen"]
    drafts = results.get("draft", {}).get("drafts", ())

    def of_steps(what: str, sequences: int, drafted: bool) -> list[float]:
        return [row[what] for row in steps if (row["sequences"], row["drafted"] > 0) == (sequences, drafted)]

    def most(values: Iterable[float | None]) -> float | None:
        return max((value for value in values if value is not None), default=None)

    def least(values: Iterable[float]) -> float | None:
        return min(values, default=None)

    speedups = {row["concurrency"]: row["ratio"] for row in runs_of(results, "adaptive")}
    return [
        _at_least("share of the limit, step of 1", 0.7, least(of_steps("of_limit", 1, False))),
        _at_least("share of the limit, step of 8", 0.7, least(of_steps("of_limit", 8, False))),
        _at_most("verification of 8 x 5 rows, of a plain step", 1.1, most(of_steps("over_plain", 8, True))),
        _at_most("passes of 64 x 5 rows", 1, most(of_steps("passes", 64, True))),
        _at_most("draft of 4 tokens for 8, ms", 4, most(row["ms"] for row in drafts if row["sequences"] == 8)),
        _at_least("adaptive of plain, 8 at a time", 2, speedups.get(8)),
        _at_least("exact match", 1, least(row["exact_match"] for row in runs_of(results))),
    ]


def _at_least(goal: str, wanted: float, measured: float | None) -> Row:
    met = None if measured is None else measured >= wanted
    return {"goal": goal, "wanted": f">= {wanted:g}", "measured": measured, "met": met}


def _at_most(goal: str, wanted: float, measured: float | None) -> Row:
    met = None if measured is None else measured <= wanted
    return {"goal": goal, "wanted": f"<= {wanted:g}", "measured": measured, "met": met}
