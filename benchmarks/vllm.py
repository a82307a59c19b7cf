"""What a draft worker gains for vLLM, by requests in flight: `specpool.vllm.RemoteDraft` against plain vLLM.

    python -m benchmarks.vllm [--concurrency 1,4,8,16] [--tokens 64] [--repeats 5] [--eager] [--output DIR]

Four engines stay loaded and take turns: plain; none, ready for drafts that never come, which is what speculation costs
vLLM in itself; ngram, vLLM's own prompt lookup; remote, `RemoteDraft`. Each has a process of its own, run by the Python
that `SPECPOOL_VLLM_PYTHON` names. The models are the embedded pair, in fp32 on the CPU. A request that ends is followed
by the next one at once, so that the batch stays full but for the end of a run. At each concurrency the first run of
each engine, and `--warm-up` further runs of RemoteDraft, which learns, do not count; `first` is the ratio of the first
runs, which is that of a new server at the first concurrency only. Ratios to plain are taken within a repeat; medians,
least and greatest are shown. `equal`: the share of plain vLLM's answers.

Draft and target share the cores of this machine and wait for each other, so that two devices are only estimated:
- `waited` is what vLLM stood still for drafts in a step, `alone` what the same passes took the draft worker when it
  measured itself on idle cores, before vLLM was started.
- `two devices` is the ratio to plain if the passes had taken that long, and all else as long as it did: with the draft
  lengths that were chosen here, and the wire as it was. `free drafts` is the ratio if vLLM had not waited at all.

The last line printed is JSON.
"""

import argparse
import os
import statistics
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks.prompts import load_prompts
from benchmarks.report import console, finish, output_folder, progress, show, whole
from benchmarks.vllm_process import VllmEngine, draft_process, token_ids, vllm_python
from specpool.engine.models.embedded_pair import embedded_pair, float32_copy

# Prompts of a run per request in flight: with fewer, the emptying batch at the end of a run counts for much.
LOAD = 2
PLAIN, REMOTE = "plain", "remote"
KINDS = {PLAIN: "plain", "none": "none", "ngram": "ngram", REMOTE: "timed"}
"""Ways to draft, and the engines of `benchmarks.vllm_process` that they are."""
Run = dict[str, Any]


def main() -> None:
    """Parses the command line, measures, prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--concurrency",
        type=_concurrencies,
        default="1,4,8,16",
        help="requests in flight, of which vLLM decodes 16 at a time",
    )
    parser.add_argument("--tokens", type=whole(2, 512), default=64, help="tokens of each answer")
    parser.add_argument("--repeats", type=whole(1, 1000), default=5)
    parser.add_argument("--warm-up", type=whole(0, 1000), default=3, help="runs of RemoteDraft to learn in")
    parser.add_argument("--prompts", type=Path, help="JSONL file; default: the prompts that come with Specpool")
    parser.add_argument("--eager", action="store_true", help="vLLM's passes are not compiled, which takes minutes")
    parser.add_argument("--output", type=output_folder, help="folder for the result")
    options = parser.parse_args()
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    try:
        rows = measure(options)
    except (OSError, RuntimeError) as error:
        parser.exit(2, f"benchmarks.vllm: {error}\n")
    show_all(rows)
    given = {name: vars(options)[name] for name in ("tokens", "repeats", "warm_up", "eager")}
    finish("vllm", {**given, "rows": rows}, options.output)


def _concurrencies(text: str) -> list[int]:
    return [whole(1, 256)(number) for number in text.split(",")]


def measure(options: argparse.Namespace) -> list[dict[str, Any]]:
    """A row for each concurrency and way to draft."""
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
    """The runs of each way to draft, of which the first does not count."""
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
    for kind, its in runs.items():
        ratios = _ratios(seconds, [run["seconds"] for run in its])
        answers = [one == other for run in its for one, other in zip(run["outputs"], truth, strict=True)]
        rows.append(
            {
                "concurrency": concurrency,
                "drafts": kind,
                "tokens_per_s": round(statistics.median(tokens / run["seconds"] for run in its[1:]), 1),
                "ratio": statistics.median(ratios[1:]),
                "ratio_min": min(ratios[1:]),
                "ratio_max": max(ratios[1:]),
                "ratio_first": ratios[0],
                "equal_answers": round(sum(answers) / len(answers), 3),
                **_drafted(its[1:]),
                **(_devices(seconds[1:], its[1:]) if kind == REMOTE else {}),
            }
        )
    return rows


def _ratios(plain: list[float], own: list[float]) -> list[float]:
    return [round(its / mine, 3) for its, mine in zip(plain, own, strict=True)]


def _drafted(runs: list[Run]) -> dict[str, Any]:
    """What a step took and drafted."""
    steps, drafted, accepted = (sum(run[name] for run in runs) for name in ("steps", "draft_tokens", "accepted"))
    return {
        "step_ms": round(1000 * sum(run["seconds"] for run in runs) / steps, 2),
        "drafted_per_step": round(drafted / steps, 3),
        "accepted": round(accepted / drafted, 3) if drafted else None,
    }


def _devices(plain: list[float], runs: list[Run]) -> dict[str, Any]:
    """Waiting for drafts, and the estimates without draft and target on the same cores."""
    steps = sum(run["steps"] for run in runs)
    two = [run["seconds"] - run["passes"] + run["alone"] for run in runs]
    free = [run["seconds"] - run["waited"] for run in runs]
    return {
        "asked": round(sum(run["asked"] for run in runs) / steps, 3),
        "waited_ms": round(1000 * sum(run["waited"] for run in runs) / steps, 2),
        "passes_ms": round(1000 * sum(run["passes"] for run in runs) / steps, 2),
        "alone_ms": round(1000 * sum(run["alone"] for run in runs) / steps, 2),
        "ratio_of_two_devices": statistics.median(_ratios(plain, two)),
        "ratio_of_free_drafts": statistics.median(_ratios(plain, free)),
    }


def show_all(rows: list[dict[str, Any]]) -> None:
    """A table of all runs, and one of the draft's time."""
    names = (
        "tokens_per_s",
        "ratio",
        "ratio_min",
        "ratio_max",
        "ratio_first",
        "equal_answers",
        "drafted_per_step",
        "accepted",
    )
    show("tokens/s, and ratios to plain vLLM", [_columns(row, "drafts", *names) for row in rows])
    names = (
        "step_ms",
        "asked",
        "waited_ms",
        "passes_ms",
        "alone_ms",
        "ratio",
        "ratio_of_two_devices",
        "ratio_of_free_drafts",
    )
    show("RemoteDraft: ms of a step", [_columns(row, *names) for row in rows if row["drafts"] == REMOTE])


def _columns(row: dict[str, Any], *names: str) -> dict[str, Any]:
    headings = {
        name: name.removeprefix("ratio_of_").replace("ratio_", "").replace("tokens_per_s", "tokens/s") for name in names
    }
    return {"at once": row["concurrency"], **{headings[name]: row[name] for name in names}}


if __name__ == "__main__":
    main()
