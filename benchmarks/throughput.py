"""Compare all draft methods with plain decoding, by requests in flight and by category of prompts.

    python -m benchmarks.throughput [--prompts FILE] [--concurrencies 1,2,4,8,16,32] [--repeats 3] [--output FOLDER]
    python -m benchmarks.throughput --arrangements separate,colocated --kinds best --concurrencies 1,4,8,16

One service runs all kinds in turns, because each request names its draft method. "plain" does not speculate. "k1" to
"k5" draft a fixed number of tokens with the draft model, "adaptive" as many as pay off. "ngram" drafts by prompt
lookup. "best" is the server's default, which picks the better method. The last three learn from run to run, so a
warm-up comes first. Ratios are taken within a repeat; the tables show medians. Answers are streamed, and the client
measures all times. "sustained" is the ratio while all places are taken, until the last request begins. "promise" is
the speedup that the server predicts halfway through a run. An answer is exact if it equals the first plain answer to
the same prompt. Exit status 1: an answer was not exact. The last line printed is JSON.

With several `--arrangements`, one service of each runs, and they take turns: "separate" has a draft worker; in
"colocated", the target worker carries the draft. "of first" is the speed relative to the first arrangement.
"""

import argparse
import asyncio
import statistics
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from itertools import cycle, islice
from typing import Any

from google.protobuf.json_format import MessageToDict

from benchmarks.answers import Answer, exact_match, measures, streamed
from benchmarks.prompts import add_prompts, checked, in_turn, load_by_category
from benchmarks.report import (
    console,
    finish,
    median,
    output_folder,
    parser_of,
    progress,
    show,
    some_of,
    whole,
    wholes,
)
from benchmarks.runs import Run, current_info, in_turns, ratios, spread
from specpool.cli.processes import ProcessFailedError
from specpool.cli.up import running
from specpool.cli.up_settings import UpSettings
from specpool.client import AsyncClient
from specpool.client.prompts import PromptLine
from specpool.client.requests import GenerateOptions
from specpool.v1 import generation_pb2 as pb

LOAD = 4
"""Prompts per request in flight. Short runs understate the speedup, because the batch empties unevenly."""
PLAIN, BEST = "plain", "best"
KINDS: dict[str, GenerateOptions] = {
    PLAIN: {"num_speculative_tokens": 0},
    **{f"k{k}": {"num_speculative_tokens": k, "draft_method": "model"} for k in range(1, 6)},
    "adaptive": {"draft_method": "model"},
    "ngram": {"draft_method": "ngram"},
    BEST: {"draft_method": "best"},
}
ARRANGEMENTS = {"default": None, "separate": True, "colocated": False}
"""The setting `separate` of `specpool up`, by arrangement."""
SHOWN = {
    "tokens/s": ("tokens_per_s", 1), "ratio": ("ratio", 2), "min": ("ratio_min", 2),
    "sustained": ("sustained_ratio", 2), "first ms": ("first_token_ms", 0),
    "p50 ms": ("token_p50_ms", 1), "p99 ms": ("token_p99_ms", 1),
    "length": ("acceptance_length", 2), "drafted": ("rounds_drafted", 2), "draft": ("draft_busy", 2),
    "verify": ("verify_busy", 2), "promise": ("predicted_ratio", 2), "exact": ("exact_match", 3),
}  # fmt: skip
"""Columns of a table: the measure and its digits."""
COMPARED = {"round ms": ("round_ms", 1), "of first": ("of_first", 2)}
OF_A_CATEGORY = ("tokens/s", "ratio", "min", "length", "drafted", "exact")
OF_AN_ARRANGEMENT = ("tokens/s", "ratio", "min", *COMPARED)


@dataclass(frozen=True, eq=False)
class Load:
    concurrency: int
    lines: list[PromptLine]
    kinds: list[str]
    category: str | None = None


def main() -> None:
    options = parse()
    try:
        pair, rows = asyncio.run(serve(options))
    except ProcessFailedError as error:
        raise SystemExit(str(error)) from None
    show_all(rows)
    result = {**pair, "max_tokens": options.max_tokens, "repeats": options.repeats, "rows": rows}
    finish("throughput", result, options.output)
    if any(row["exact_match"] < 1 for row in rows):
        raise SystemExit("some answers differ from plain decoding")


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Options of the command line, with the prompts by category."""
    parser, positive = parser_of(__doc__), whole(1, 10**9)
    parser.add_argument("--target")
    parser.add_argument("--draft")
    add_prompts(parser)
    parser.add_argument("--concurrencies", type=wholes(1, 10**6), default=[1, 2, 4, 8, 16, 32], metavar="1,2,...")
    parser.add_argument(
        "--kinds", type=some_of(KINDS, [PLAIN]), default=list(KINDS), metavar="A,B,...",
        help=f"some of {','.join(KINDS)}; plain always runs",
    )  # fmt: skip
    parser.add_argument(
        "--arrangements", type=some_of(ARRANGEMENTS), default=["default"], metavar="A,B,...",
        help=f"some of {','.join(ARRANGEMENTS)}",
    )  # fmt: skip
    parser.add_argument("--max-tokens", type=positive, default=128)
    parser.add_argument("--repeats", type=positive, default=3)
    parser.add_argument(
        "--num-prompts", type=positive,
        help="prompts of a run; default: four times the concurrency, at least one of each category",
    )  # fmt: skip
    parser.add_argument(
        "--category-concurrency", type=whole(0, 10**6), default=1, help="concurrency of runs by category; 0: none"
    )
    parser.add_argument("--output", type=output_folder, help="folder for the result")
    options = parser.parse_args(arguments)
    options.concurrencies = sorted(options.concurrencies)
    options.categories = checked(parser, lambda: load_by_category(options.prompts))
    return options


async def serve(options: argparse.Namespace) -> tuple[dict[str, Any], list[Run]]:
    """Descriptions of both models, and the rows of `measure`."""
    loads = plan(options)
    settings = UpSettings(
        port=0, log_level="error", drain_seconds=1, prefix_caching=False, target=options.target, draft=options.draft,
        max_num_seqs=max(load.concurrency for load in loads),
    )  # fmt: skip
    async with AsyncExitStack() as stack:
        clients = {}
        for name in options.arrangements:
            console.print(f"starting the service: {name}")
            own = settings.model_copy(update={"separate": ARRANGEMENTS[name]})
            address = await stack.enter_async_context(running(own))
            clients[name] = await stack.enter_async_context(AsyncClient(address))
        info = await next(iter(clients.values())).model_info()
        pair = {
            name: MessageToDict(model, preserving_proto_field_name=True)
            for name, model in (("target", info.target), ("draft", info.draft))
        }
        return {**pair, "threads": settings.threads}, await measure(clients, loads, options)


def plan(options: argparse.Namespace) -> list[Load]:
    """A load for each concurrency, of all categories in turn; then one for each category."""
    categories: dict[str, list[PromptLine]] = options.categories

    def load(concurrency: int, lines: list[PromptLine], kinds: list[str], category: str | None = None) -> Load:
        count = options.num_prompts or max(len(categories) if category is None else 1, LOAD * concurrency)
        return Load(concurrency, list(islice(cycle(lines), count)), kinds, category)

    mixed = in_turn(categories.values())
    loads = [load(concurrency, mixed, options.kinds) for concurrency in options.concurrencies]
    if len(categories) > 1 and BEST in options.kinds and options.category_concurrency:
        loads += [load(options.category_concurrency, lines, [PLAIN, BEST], name) for name, lines in categories.items()]
    return loads


async def measure(clients: Mapping[str, AsyncClient], loads: list[Load], options: argparse.Namespace) -> list[Run]:
    """Measure all loads and kinds with the service of each arrangement."""
    mixed = [(client, load) for client in clients.values() for load in loads if load.category is None]
    for client, load in progress(mixed, "learning what rounds cost"):
        await run(client, Load(load.concurrency, load.lines[: load.concurrency], []), BEST, options.max_tokens, {})
    truth: dict[str, list[int]] = {}
    cases = [(load, kind, name) for load in loads for kind in load.kinds for name in clients]
    runs = await in_turns(
        cases, options.repeats, lambda case: run(clients[case[2]], *case[:2], options.max_tokens, truth)
    )
    rows, first = [], next(iter(clients))
    for (load, kind, name), found in runs.items():
        speeds = ratios(found, runs[load, kind, first], "tokens_per_s")
        compared = {"of_first": round(statistics.median(speeds), 3)} if len(clients) > 1 else {"of_first": None}
        rows.append({"arrangement": name, **summary(load, kind, found, runs[load, PLAIN, name]), **compared})
    return rows


async def run(client: AsyncClient, load: Load, kind: str, max_tokens: int, truth: dict[str, list[int]]) -> Run:
    """Run all prompts of the load once. `truth`: answers of earlier runs by prompt."""
    free = asyncio.Semaphore(load.concurrency)

    async def one(line: PromptLine) -> Answer:
        async with free:
            return await streamed(client, line, {"max_tokens": max_tokens, **KINDS[kind]})

    before, began = await current_info(client), time.perf_counter()
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(one(line)) for line in load.lines]
        await tasks[(len(tasks) - 1) // 2]
        middle = await client.server_info()  # while the most requests are in flight
    seconds, after = time.perf_counter() - began, await current_info(client)
    answers, rounds = [task.result() for task in tasks], after.counters.rounds - before.counters.rounds
    spent = {
        f"{stage}_busy": (after.counters.stage_seconds[stage] - before.counters.stage_seconds[stage]) / seconds
        for stage in ("draft", "verify")
    }
    adaptive = "num_speculative_tokens" not in KINDS[kind]
    return {
        **measures(answers, seconds),
        "round_ms": 1000 * seconds / rounds,
        **spent,
        "predicted_ratio": predicted_ratio(middle.speculation) if adaptive else None,
        "draft_steps": middle.speculation.draft_steps if adaptive else None,
        "exact_match": exact_match(load.lines, answers, truth),
    }


def predicted_ratio(state: pb.SpeculationState) -> float | None:
    """The plan's expected speedup over plain decoding; None without a plan."""
    return state.expected_tokens_per_s / state.plain_tokens_per_s if state.expected_tokens_per_s else None


def summary(load: Load, kind: str, runs: list[Run], plain: list[Run]) -> Run:
    """The row of a load and kind. `plain`: plain runs of the same repeats."""
    sustained_ratios = ratios(runs, plain, "sustained_tokens_per_s")
    row = {
        "tokens_per_s": median(runs, "tokens_per_s"),
        **spread(ratios(runs, plain, "tokens_per_s")),
        "sustained_ratio": statistics.median(sustained_ratios) if sustained_ratios else None,
        **{name: median(runs, name) for name in runs[0]},
    }
    rounded = {name: None if value is None else round(value, 3) for name, value in row.items()}
    rounded["exact_match"] = min(run["exact_match"] for run in runs)  # not rounded: one wrong answer must show
    return {"concurrency": load.concurrency, "category": load.category, "kind": kind, **rounded}


def show_all(rows: list[Run]) -> None:
    groups: dict[tuple[str, int], list[Run]] = {}
    for row in rows:
        if row["category"] is None:
            groups.setdefault((row["arrangement"], row["concurrency"]), []).append(row)
    for (arrangement, concurrency), own in groups.items():
        show(f"{arrangement}, {concurrency} at a time", [_cells(row, ("kind",)) for row in own])
    mixed = [row for own in groups.values() for row in own if row["of_first"] is not None]
    by_case = ("concurrency", "kind", "arrangement")
    compared = [_cells(row, by_case, OF_AN_ARRANGEMENT) for row in mixed]
    show("arrangements", sorted(compared, key=lambda row: (row["concurrency"], row["kind"])))
    best = [row for row in rows if row["category"] is not None and row["kind"] == BEST]
    show("best, by category", [_cells(row, ("arrangement", "category"), OF_A_CATEGORY) for row in best])


def _cells(row: Run, of: Iterable[str], headings: Iterable[str] = SHOWN) -> Run:
    shown = {name: row[name] for name in of}
    for heading in headings:
        name, digits = (SHOWN | COMPARED)[heading]
        shown[heading] = None if row[name] is None else f"{row[name]:.{digits}f}"
    return shown


if __name__ == "__main__":
    main()
