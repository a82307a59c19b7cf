"""Speed of speculation against plain decoding: every draft method, by requests in flight and by category of prompts.

    python -m benchmarks.throughput [--prompts FILE] [--concurrencies 1,2,4,8,16,32] [--repeats 3] [--output FOLDER]

One service runs all kinds in turns, since requests name their draft method: plain; k1 to k5, that number of draft
tokens by the model; adaptive, as many of them as pay; ngram, the same by prompt lookup; best, the server's default,
whichever promises more. What the last three learn is kept from run to run; the first runs do not count. Ratios are
taken within a repeat; medians over the repeats are shown. Answers are streamed, one message per round and answer in
every kind, and times are those that the client sees. The plan's promise is read when half of a run is done. Categories
are those of Spec-Bench questions. An answer is exact if it is the one that plain decoding gave to its prompt first, at
the lowest concurrency; the exit status is 1 if one is not. The last line printed is JSON.
"""

import argparse
import asyncio
import json
import statistics
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from pathlib import Path
from typing import Any

from google.protobuf.json_format import MessageToDict

from benchmarks.answers import Answer, answer, measures
from benchmarks.figures import throughput_figure
from benchmarks.prompts import in_turn, load_by_category
from benchmarks.report import console, finish, median, output_folder, progress, show
from specpool.cli.processes import ProcessFailedError
from specpool.cli.up import UpSettings, running
from specpool.client import AsyncClient
from specpool.client.prompts import PromptLine
from specpool.client.requests import GenerateOptions
from specpool.v1 import generation_pb2 as pb

# Prompts of a run per request in flight. Short runs understate the speedup: plainly decoded answers of one length end
# together, others one by one, while the batch empties.
LOAD = 4
PLAIN, BEST = "plain", "best"
KINDS: dict[str, GenerateOptions] = {
    PLAIN: {"num_speculative_tokens": 0},
    **{f"k{k}": {"num_speculative_tokens": k, "draft_method": "model"} for k in range(1, 6)},
    "adaptive": {"draft_method": "model"},
    "ngram": {"draft_method": "ngram"},
    BEST: {"draft_method": "best"},
}
# Columns of a table: the measure and its digits.
SHOWN = {
    "tokens/s": ("tokens_per_s", 1), "ratio": ("ratio", 2), "least": ("ratio_min", 2),
    "first ms": ("first_token_ms", 0), "p50 ms": ("token_p50_ms", 1), "p99 ms": ("token_p99_ms", 1),
    "length": ("acceptance_length", 2), "drafted": ("rounds_drafted", 2), "draft": ("draft_busy", 2),
    "verify": ("verify_busy", 2), "promise": ("predicted_ratio", 2), "exact": ("exact_match", 3),
}  # fmt: skip
OF_A_CATEGORY = ("tokens/s", "ratio", "least", "length", "drafted", "exact")
Run = dict[str, Any]


@dataclass(frozen=True, eq=False)
class Load:
    """The prompts of a run, of which `concurrency` are in flight at a time."""

    concurrency: int
    lines: list[PromptLine]
    kinds: list[str]
    category: str | None = None


def main() -> None:
    """Parses the command line, measures, prints."""
    options = parse()
    try:
        pair, rows = asyncio.run(serve(options))
    except ProcessFailedError as error:
        raise SystemExit(str(error)) from None
    show_all(rows)
    result = {**pair, "max_tokens": options.max_tokens, "repeats": options.repeats, "rows": rows}
    finish("throughput", result, options.output, throughput_figure(rows))
    if any(row["exact_match"] < 1 for row in rows):
        raise SystemExit("some answers are not those of plain decoding")


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Options of the command line, with the prompts by category."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target")
    parser.add_argument("--draft")
    parser.add_argument("--prompts", type=Path)
    parser.add_argument("--concurrencies", type=_numbers, default=[1, 2, 4, 8, 16, 32], metavar="1,2,...")
    every = list(KINDS)
    parser.add_argument(
        "--kinds", type=_kinds, default=every, help=f"some of {','.join(every)}; plain is always included"
    )
    parser.add_argument("--max-tokens", type=_positive, default=128)
    parser.add_argument("--repeats", type=_positive, default=3)
    parser.add_argument(
        "--num-prompts",
        type=_positive,
        help="prompts of a run; default: four times the concurrency, at least one of each category",
    )
    parser.add_argument(
        "--category-concurrency", type=_natural, default=1, help="concurrency of the runs by category; 0: no such runs"
    )
    parser.add_argument("--output", type=output_folder, help="folder for the result and the plot")
    options = parser.parse_args(arguments)
    try:
        options.categories = load_by_category(options.prompts)
        if not options.categories:
            raise ValueError(f"{options.prompts} holds none")
    except (OSError, ValueError, LookupError, TypeError) as error:
        parser.error(f"--prompts: {error}")
    return options


def _natural(text: str, least: int = 0) -> int:
    if not text.isdecimal() or int(text) < least:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from {least} on")
    return int(text)


def _positive(text: str) -> int:
    return _natural(text, least=1)


def _numbers(text: str) -> list[int]:
    return sorted(map(_positive, text.split(",")))


def _kinds(text: str) -> list[str]:
    named = {PLAIN, *text.split(",")}
    if unknown := named - KINDS.keys():
        raise argparse.ArgumentTypeError(f"unknown: {', '.join(sorted(unknown))}")
    return [kind for kind in KINDS if kind in named]


async def serve(options: argparse.Namespace) -> tuple[dict[str, Any], list[Run]]:
    """Both models as the workers describe them, and the rows of `measure`."""
    loads = plan(options)
    window = max(load.concurrency for load in loads)
    settings = UpSettings(
        port=0, log_level="error", drain_seconds=1, prefix_caching=False, max_num_seqs=window,
        target=options.target, draft=options.draft,
    )  # fmt: skip
    console.print("starting the service")
    async with running(settings) as address, AsyncClient(address) as client:
        info = await client.model_info()
        pair = {
            name: MessageToDict(model, preserving_proto_field_name=True)
            for name, model in (("target", info.target), ("draft", info.draft))
        }
        return {**pair, "threads": settings.threads}, await measure(client, loads, options)


def plan(options: argparse.Namespace) -> list[Load]:
    """The loads to run: one for each concurrency, of all categories in turn, then one for each category."""
    categories: dict[str, list[PromptLine]] = options.categories

    def load(concurrency: int, lines: list[PromptLine], kinds: list[str], category: str | None = None) -> Load:
        count = options.num_prompts or max(len(categories) if category is None else 1, LOAD * concurrency)
        return Load(concurrency, list(islice(cycle(lines), count)), kinds, category)

    mixed = in_turn(categories.values())
    loads = [load(concurrency, mixed, options.kinds) for concurrency in options.concurrencies]
    if len(categories) > 1 and BEST in options.kinds and options.category_concurrency:
        loads += [load(options.category_concurrency, its, [PLAIN, BEST], name) for name, its in categories.items()]
    return loads


async def measure(client: AsyncClient, loads: list[Load], options: argparse.Namespace) -> list[Run]:
    """One row for each load and kind: medians over the repeats."""
    for load in progress([load for load in loads if load.category is None], "learning what rounds cost"):
        await run(client, Load(load.concurrency, load.lines[: load.concurrency], []), BEST, options.max_tokens, {})
    truth: dict[str, list[int]] = {}
    runs: dict[tuple[Load, str], list[Run]] = {}
    cases = [(load, kind) for load in loads for kind in load.kinds]
    for load, kind in progress([case for _ in range(options.repeats) for case in cases], "runs"):
        runs.setdefault((load, kind), []).append(await run(client, load, kind, options.max_tokens, truth))
    return [summary(load, kind, found, runs[load, PLAIN]) for (load, kind), found in runs.items()]


async def run(client: AsyncClient, load: Load, kind: str, max_tokens: int, truth: dict[str, list[int]]) -> Run:
    """Runs all prompts of the load once. `truth` has the answer to every prompt of earlier runs."""
    free = asyncio.Semaphore(load.concurrency)

    async def one(line: PromptLine) -> Answer:
        async with free:
            return await answer(client, line, {"max_tokens": max_tokens, **KINDS[kind]})

    before, began = await client.server_info(), time.perf_counter()
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(one(line)) for line in load.lines]
        await tasks[(len(tasks) - 1) // 2]
        middle = await client.server_info()  # while the most requests are in flight
    seconds, after = time.perf_counter() - began, await client.server_info()
    answers = [task.result() for task in tasks]
    spent = {
        f"{stage}_busy": (after.counters.stage_seconds[stage] - before.counters.stage_seconds[stage]) / seconds
        for stage in ("draft", "verify")
    }
    adaptive = "num_speculative_tokens" not in KINDS[kind]
    return {
        **measures(answers, seconds),
        **spent,
        "predicted_ratio": predicted_ratio(middle.speculation) if adaptive else None,
        "draft_steps": middle.speculation.draft_steps if adaptive else None,
        "exact_match": exact_match(load.lines, answers, truth),
    }


def predicted_ratio(state: pb.SpeculationState) -> float | None:
    """The expected speedup of the plan over plain decoding; None before there is a plan."""
    return state.expected_tokens_per_s / state.plain_tokens_per_s if state.expected_tokens_per_s else None


def exact_match(lines: list[PromptLine], answers: list[Answer], truth: dict[str, list[int]]) -> float:
    """The share of answers equal to the known ones; the first answer to a prompt becomes the known one."""
    tokens = [list(answer.response.token_ids) for answer in answers]
    known = [truth.setdefault(json.dumps(line.prompt), its) for line, its in zip(lines, tokens, strict=True)]
    return sum(one == other for one, other in zip(tokens, known, strict=True)) / len(lines)


def summary(load: Load, kind: str, runs: list[Run], plain: list[Run]) -> Run:
    """The row of a load and kind, whose runs stand beside the plain ones of the same repeats."""
    ratios = [mine["tokens_per_s"] / its["tokens_per_s"] for mine, its in zip(runs, plain, strict=True)]
    row = {
        "tokens_per_s": median(runs, "tokens_per_s"),
        **{"ratio": statistics.median(ratios), "ratio_min": min(ratios), "ratio_max": max(ratios)},
        **{name: median(runs, name) for name in runs[0]},
        "exact_match": min(run["exact_match"] for run in runs),
    }
    rounded = {name: None if value is None else round(value, 3) for name, value in row.items()}
    # Not rounded, or one wrong answer of thousands would be none.
    rounded["exact_match"] = row["exact_match"]
    return {"concurrency": load.concurrency, "category": load.category, "kind": kind, **rounded}


def show_all(rows: list[Run]) -> None:
    """A table for each concurrency, and one of all categories."""
    mixed = [row for row in rows if row["category"] is None]
    for concurrency in dict.fromkeys(row["concurrency"] for row in mixed):
        mine = [row for row in mixed if row["concurrency"] == concurrency]
        show(f"{concurrency} at a time", [for_people(row, "kind") for row in mine])
    best = [row for row in rows if row["category"] is not None and row["kind"] == BEST]
    show("best, by category", [for_people(row, "category", OF_A_CATEGORY) for row in best])


def for_people(row: Run, of: str, headings: Iterable[str] = SHOWN) -> Run:
    """The part of a row that a table has room for."""
    shown = {of: row[of]}
    for heading in headings:
        name, digits = SHOWN[heading]
        shown[heading] = None if row[name] is None else f"{row[name]:.{digits}f}"
    return shown


if __name__ == "__main__":
    main()
