"""Measure the speedup of vLLM with `specpool.vllm.RemoteDraft`, by requests in flight.

    python -m benchmarks.vllm [--concurrency 1,4,8,16] [--tokens 64] [--repeats 5] [--eager] [--output DIR]

Four engines stay loaded and take turns: "plain"; "none", with speculation but without draft tokens, which shows the
overhead of speculation in vLLM; "ngram", vLLM's own prompt lookup; "remote", `RemoteDraft`. Each engine is a process of
the Python that SPECPOOL_VLLM_PYTHON names. All run the embedded pair in fp32 on the CPU. A new request follows each
finished one, so the batch stays full until the end of a run.

The first run of each engine and the `--warm-up` runs of RemoteDraft do not count. `first` is the ratio of the first
runs; only at the first concurrency does it show a new server. Ratios to plain are taken within a repeat. The tables
show medians, minimum and maximum. `equal` is the share of answers that equal plain vLLM's answers.

Draft and target share the cores and wait for each other, so the figures for two devices are estimates. `waited` is the
time per step in which vLLM waits for drafts. `alone` is the time of the same draft passes on idle cores. `two devices`
is the ratio to plain with passes as fast as `alone`; `free drafts` is the ratio without any waiting. The last line
printed is JSON.
"""

import argparse
import os
import statistics
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

from benchmarks.prompts import LOAD, add_prompts, load_prompts, token_ids
from benchmarks.report import console, finish, output_folder, parser_of, progress, show, whole, wholes
from benchmarks.runs import Run, spread
from benchmarks.vllm_process import VllmEngine, draft_process, vllm_python
from specpool.engine.models.embedded_pair import embedded_pair, float32_copy

PLAIN, REMOTE = "plain", "remote"
KINDS = {PLAIN: "plain", "none": "none", "ngram": "ngram", REMOTE: "timed"}
"""Draft methods, and their names in `benchmarks.vllm_process.SPECULATION`."""
SPEED = ("drafts", "tokens_per_s", "ratio", "ratio_min", "ratio_max", "ratio_first", "equal_answers",
         "drafted_per_step", "accepted")  # fmt: skip
STEP = ("step_ms", "asked", "waited_ms", "passes_ms", "alone_ms", "ratio", "ratio_of_two_devices",
        "ratio_of_free_drafts")  # fmt: skip
"""Columns of the two tables."""
TIMES = ("waited", "passes", "alone")


def main() -> None:
    """Parse the command line and run the benchmark."""
    parser = parser_of(__doc__)
    parser.add_argument(
        "--concurrency", type=wholes(1, 256), default="1,4,8,16", help="requests in flight; vLLM decodes 16 at a time"
    )
    parser.add_argument("--tokens", type=whole(2, 512), default=64, help="tokens of each answer")
    parser.add_argument("--repeats", type=whole(1, 1000), default=5)
    parser.add_argument("--warm-up", type=whole(0, 1000), default=3, help="runs in which RemoteDraft learns")
    add_prompts(parser)
    parser.add_argument("--eager", action="store_true", help="do not compile vLLM's passes, which takes minutes")
    parser.add_argument("--output", type=output_folder, help="folder for the result")
    options = parser.parse_args()
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    try:
        rows = measure(options)
    except (OSError, RuntimeError) as error:
        parser.exit(2, f"benchmarks.vllm: {error}\n")
    show_all(rows)
    setup = {name: vars(options)[name] for name in ("tokens", "repeats", "warm_up", "eager")}
    finish("vllm", {**setup, "rows": rows}, options.output)


def measure(options: argparse.Namespace) -> list[dict[str, Any]]:
    """One row for each concurrency and draft method."""
    vllm_python()
    pair, target = embedded_pair(), float32_copy()
    prompts = token_ids(target, load_prompts(options.prompts, LOAD * max(options.concurrency)))
    with ExitStack() as stack:
        draft = stack.enter_context(draft_process(pair.draft))
        draft.wait_ready()
        console.print(f"starting {len(KINDS)} vLLM engines: minutes, if vLLM has not compiled the model before")
        engines = {}
        for kind, name in KINDS.items():
            address = draft.address if kind == REMOTE else None
            engines[kind] = stack.enter_context(VllmEngine(target, name, address, enforce_eager=options.eager))
        for engine in engines.values():
            engine.wait_ready()
        rows = []
        for concurrency in options.concurrency:
            runs = run_in_turns(engines, prompts[: LOAD * concurrency], concurrency, options)
            rows += summaries(runs, concurrency)
        return rows


def run_in_turns(
    engines: dict[str, VllmEngine], prompts: list[list[int]], concurrency: int, options: argparse.Namespace
) -> dict[str, list[Run]]:
    """The runs of each draft method. The first one does not count."""
    runs: dict[str, list[Run]] = {kind: [] for kind in engines}
    warm_up = [*engines, *[REMOTE] * options.warm_up]
    for turn, kind in enumerate(progress(warm_up + [*engines] * options.repeats, f"{concurrency} at a time")):
        run = engines[kind].run(prompts, options.tokens, concurrency)
        if not len(engines) <= turn < len(warm_up):
            runs[kind].append(run)
    return runs


def summaries(runs: dict[str, list[Run]], concurrency: int) -> list[dict[str, Any]]:
    """The rows of one concurrency."""
    seconds, truth = [run["seconds"] for run in runs[PLAIN]], runs[PLAIN][0]["outputs"]
    tokens = sum(map(len, truth))
    rows = []
    for kind, own in runs.items():
        ratios, counted = _ratios(seconds, [run["seconds"] for run in own]), own[1:]
        answers = [one == other for run in own for one, other in zip(run["outputs"], truth, strict=True)]
        rows.append(
            {
                "concurrency": concurrency,
                "drafts": kind,
                "tokens_per_s": round(statistics.median(tokens / run["seconds"] for run in counted), 1),
                **spread(ratios[1:]),
                "ratio_first": ratios[0],
                "equal_answers": round(sum(answers) / len(answers), 3),
                **_drafted(counted),
                **(_devices(seconds[1:], counted) if kind == REMOTE else {}),
            }
        )
    return rows


def _ratios(plain: list[float], own: list[float]) -> list[float]:
    return [round(base / seconds, 3) for base, seconds in zip(plain, own, strict=True)]


def _drafted(runs: list[Run]) -> dict[str, Any]:
    """Time and draft tokens per step."""
    steps, drafted, accepted = (sum(run[name] for run in runs) for name in ("steps", "draft_tokens", "accepted"))
    return {
        "step_ms": round(1000 * sum(run["seconds"] for run in runs) / steps, 2),
        "drafted_per_step": round(drafted / steps, 3),
        "accepted": round(accepted / drafted, 3) if drafted else None,
    }


def _devices(plain: list[float], runs: list[Run]) -> dict[str, Any]:
    """Time spent waiting for drafts, and estimates for two devices."""
    steps = sum(run["steps"] for run in runs)
    two = [run["seconds"] - run["passes"] + run["alone"] for run in runs]
    free = [run["seconds"] - run["waited"] for run in runs]
    return {
        "asked": round(sum(run["asked"] for run in runs) / steps, 3),
        **{f"{name}_ms": round(1000 * sum(run[name] for run in runs) / steps, 2) for name in TIMES},
        "ratio_of_two_devices": statistics.median(_ratios(plain, two)),
        "ratio_of_free_drafts": statistics.median(_ratios(plain, free)),
    }


def show_all(rows: list[dict[str, Any]]) -> None:
    """Print a table of all runs, and one of the draft worker's time."""
    show("tokens/s, and ratios to plain vLLM", [_columns(row, SPEED) for row in rows])
    show("RemoteDraft: ms of a step", [_columns(row, STEP) for row in rows if row["drafts"] == REMOTE])


def _columns(row: dict[str, Any], names: Sequence[str]) -> dict[str, Any]:
    headings = {"tokens_per_s": "tokens/s"}
    short = {name: name.removeprefix("ratio_of_").replace("ratio_", "") for name in names}
    return {"at once": row["concurrency"], **{headings.get(name, short[name]): row[name] for name in names}}


if __name__ == "__main__":
    main()
