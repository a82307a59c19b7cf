"""Measure the speedup of vLLM with `specpool.vllm.RemoteDraft`, by requests in flight.

    python -m benchmarks.vllm [--concurrency 1,4,8,16] [--tokens 64] [--repeats 5] [--eager] [--output DIR]

Four engines stay loaded and take turns: "plain"; "none", with speculation but without draft tokens, which shows the
overhead of speculation in vLLM; "ngram", vLLM's own prompt lookup; "remote", `RemoteDraft`. Each engine is a process of
the Python that SPECPOOL_VLLM_PYTHON names. All run the embedded pair in fp32 on the CPU. A new request follows each
finished one, so the batch stays full until the end of a run.

The first run of each engine and the `--warm-up` runs of RemoteDraft do not count. `first` is the ratio of the first
runs; only at the first concurrency does it show a new server. Ratios to plain are taken within a repeat. The tables
show medians, minimum and maximum. `equal` is the share of answers that equal plain vLLM's answers. The last line
printed is JSON.
"""

import argparse
import os
import statistics
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks.prompts import LOAD, add_prompts, checked, load_prompts, token_ids
from benchmarks.report import console, finish, output_folder, parser_of, progress, show, whole, wholes
from benchmarks.runs import Run, spread
from benchmarks.vllm_process import VllmEngine, draft_process, vllm_python
from specpool.engine.models.embedded_pair import embedded_pair, float32_copy

PLAIN, REMOTE = "plain", "remote"
KINDS = (PLAIN, "none", "ngram", REMOTE)
COLUMNS = ("concurrency", "drafts", "tokens_per_s", "ratio", "ratio_min", "ratio_max", "ratio_first", "equal_answers",
           "drafted_per_step", "accepted")  # fmt: skip


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument(
        "--concurrency", type=wholes(1, 256), default="1,4,8,16", help="requests in flight; vLLM decodes 16 at a time"
    )
    parser.add_argument("--tokens", type=whole(2, 512), default=64, help="tokens of each answer")
    parser.add_argument("--repeats", type=whole(1, 1000), default=5)
    parser.add_argument("--warm-up", type=whole(0, 1000), default=3, help="runs in which RemoteDraft learns")
    add_prompts(parser)
    parser.add_argument(
        "--draft", type=Path, help="folder of the draft; default: the quantized target, whose drafts are good but slow"
    )
    parser.add_argument("--eager", action="store_true", help="do not compile vLLM's passes, which takes minutes")
    parser.add_argument("--output", type=output_folder, help="folder for the result")
    options = parser.parse_args()
    options.lines = checked(parser, lambda: load_prompts(options.prompts, LOAD * max(options.concurrency)))
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    try:
        rows = measure(options)
    except (OSError, RuntimeError) as error:
        parser.exit(2, f"benchmarks.vllm: {error}\n")
    show("tokens/s, and ratios to plain vLLM", [{name: row[name] for name in COLUMNS} for row in rows])
    setup = {name: vars(options)[name] for name in ("tokens", "repeats", "warm_up", "eager")}
    finish("vllm", {**setup, "rows": rows}, options.output)


def measure(options: argparse.Namespace) -> list[dict[str, Any]]:
    vllm_python()
    draft_model, target = options.draft or embedded_pair().target, float32_copy()
    prompts = token_ids(target, options.lines)
    with ExitStack() as stack:
        draft = stack.enter_context(draft_process(draft_model))
        draft.wait_ready()
        console.print(f"starting {len(KINDS)} vLLM engines: minutes, if vLLM has not compiled the model before")
        engines = {}
        for kind in KINDS:
            address = draft.address if kind == REMOTE else None
            engines[kind] = stack.enter_context(VllmEngine(target, kind, address, enforce_eager=options.eager))
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
            }
        )
    return rows


def _ratios(plain: list[float], own: list[float]) -> list[float]:
    return [round(base / seconds, 3) for base, seconds in zip(plain, own, strict=True)]


def _drafted(runs: list[Run]) -> dict[str, Any]:
    steps, drafted, accepted = (sum(run[name] for run in runs) for name in ("steps", "draft_tokens", "accepted"))
    return {
        "step_ms": round(1000 * sum(run["seconds"] for run in runs) / steps, 2),
        "drafted_per_step": round(drafted / steps, 3),
        "accepted": round(accepted / drafted, 3) if drafted else None,
    }


if __name__ == "__main__":
    main()
