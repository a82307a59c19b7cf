"""What a draft worker gains for vLLM: plain vLLM, its own prompt lookup, and `specpool.vllm.RemoteDraft`.

    python -m benchmarks.vllm [--concurrency 1,4,8,16] [--tokens 64] [--repeats 3] [--eager] [--output DIR]

The embedded pair, on the CPU; `SPECPOOL_VLLM_PYTHON` names the Python of an environment with vLLM. The three engines
stay loaded and take turns. Draft and target share the cores of this machine, so that drafts cost time that another
device would give for nothing. The last line printed is JSON.
"""

import argparse
import statistics
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks.prompts import load_prompts
from benchmarks.report import console, finish, output_folder, show
from benchmarks.vllm_process import SPECULATION, VllmEngine, draft_process, token_ids
from engine.models.embedded_pair import embedded_pair


def main() -> None:
    """Parses the command line, measures, prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--concurrency", default="1,4,8,16", help="requests at a time, separated by commas")
    parser.add_argument("--tokens", type=int, default=64, help="tokens of each answer")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--prompts", type=Path, help="JSONL file; default: the prompts that come with Specpool")
    parser.add_argument("--eager", action="store_true", help="vLLM's passes are not compiled, which takes minutes")
    parser.add_argument("--output", type=output_folder, help="folder for the result")
    options = parser.parse_args()
    concurrencies = [int(number) for number in options.concurrency.split(",")]
    try:
        rows = measure(concurrencies, options)
    except (OSError, RuntimeError) as error:
        parser.exit(2, f"benchmarks.vllm: {error}\n")
    show("tokens/s; ratio to plain vLLM, share of plain vLLM's answers", rows)
    finish(
        "vllm", {**{name: vars(options)[name] for name in ("tokens", "repeats", "eager")}, "rows": rows}, options.output
    )


def measure(concurrencies: list[int], options: argparse.Namespace) -> list[dict[str, Any]]:
    """A row for each concurrency and way to draft."""
    pair = embedded_pair()
    prompts = token_ids(pair.target, load_prompts(options.prompts, max(concurrencies)))
    with ExitStack() as stack:
        draft = stack.enter_context(draft_process(pair.draft))
        console.print("starting three vLLM engines: minutes, if vLLM has not compiled the model before")
        engines = {}
        for kind in SPECULATION:
            address = draft.address if kind == "remote" else None
            engines[kind] = stack.enter_context(VllmEngine(pair.target, kind, address, enforce_eager=options.eager))
        for engine in engines.values():
            engine.wait_ready().run(prompts[:1], options.tokens)  # the first run is slower
        return [row for concurrency in concurrencies for row in compare(engines, prompts[:concurrency], options)]


def compare(
    engines: dict[str, VllmEngine], prompts: list[list[int]], options: argparse.Namespace
) -> list[dict[str, Any]]:
    """Rows of one concurrency, of runs in turns."""
    runs: dict[str, list[dict[str, Any]]] = {kind: [] for kind in engines}
    for _ in range(options.repeats):
        for kind, engine in engines.items():
            runs[kind].append(engine.run(prompts, options.tokens))
    tokens = len(prompts) * options.tokens
    plain = statistics.median(tokens / run["seconds"] for run in runs["plain"])
    truth = runs["plain"][0]["outputs"]
    rows = []
    for kind, its in runs.items():
        speed = statistics.median(tokens / run["seconds"] for run in its)
        answers = [one == other for run in its for one, other in zip(run["outputs"], truth, strict=True)]
        drafted = sum(run["draft_tokens"] for run in its)
        rows.append(
            {
                "concurrency": len(prompts),
                "drafts": kind,
                "tokens_per_s": round(speed, 1),
                "ratio": round(speed / plain, 2),
                "equal_answers": round(sum(answers) / len(answers), 3),
                "drafted": drafted,
                "accepted": round(sum(run["accepted"] for run in its) / drafted, 3) if drafted else None,
            }
        )
    return rows


if __name__ == "__main__":
    main()
