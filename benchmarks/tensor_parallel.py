"""A model divided among ranks, beside the same model in one process, on a CPU.

    python -m benchmarks.tensor_parallel [--model FOLDER] [--ranks 1 2] [--repeats 5] [--output FOLDER]

For each number of ranks, with both kinds of sums: times of passes and the share of them that collectives take, memory
of each rank, time to load, and whether token ids and logits are those of one process. The ranks share the threads of
this machine evenly; one process is measured with all of them, and with as few as a rank has. All engines stay loaded
and take turns; medians are shown. Collectives are timed on rank 0, with its waiting for slower ranks. The last line
printed is JSON. `python -m benchmarks.tensor_parallel_estimate` estimates passes on GPUs.
"""

import argparse
import os
import statistics
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.divided_engine import MAX_MODEL_LEN, MAX_SEQUENCES, Kind, MeasuredEngine, Memory, Pass, Start, Timing
from benchmarks.engine_answers import Answers
from benchmarks.prompts import load_prompts
from benchmarks.report import finish, output_folder, progress, show, whole
from benchmarks.vllm_process import token_ids
from specpool.engine.config.options import MAX_RANKS
from specpool.engine.config.sources import UnsupportedModelError
from specpool.engine.models.embedded_pair import embedded_pair
from specpool.engine.sharding.shares import Sums
from specpool.engine.startup.sharded import load_sharding

PASSES = {
    "1 sequence": Pass(1, 1, 128),
    "8 sequences": Pass(8, 1, 128),
    "16 sequences": Pass(MAX_SEQUENCES, 1, 128),
    "prefill of 256": Pass(1, 256, 0),
}
SUMS: tuple[Sums, ...] = ("whole", "parts")
MIB = 2**20
TITLES = {
    "passes": "milliseconds of a pass (128 positions cached, but for the prefill)",
    "collectives": "collectives of a pass, as rank 0 sees them",
    "memory": "MiB of each rank, and the largest rank's part of one process",
    "equality": "compared with one process that decodes token by token",
}

Row = dict[str, Any]


def main() -> None:
    """Parses the command line, measures, prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="folder; by default the embedded target")
    parser.add_argument("--ranks", type=whole(1, MAX_RANKS), nargs="+", default=[1, 2], help="1 is always measured")
    parser.add_argument("--threads", type=whole(1, 1024), default=len(os.sched_getaffinity(0)), help="of all ranks")
    parser.add_argument("--repeats", type=whole(1, 1000), default=5)
    parser.add_argument(
        "--steps", type=whole(1, 1000), default=3, help="passes per repeat, of which the fastest counts"
    )
    parser.add_argument("--prompts", type=Path, help="JSONL file; default: the prompts that come with Specpool")
    parser.add_argument("--num-prompts", type=whole(1, MAX_SEQUENCES), default=8)
    parser.add_argument("--max-tokens", type=whole(1, 128), default=24, help="tokens of each answer")
    parser.add_argument("--output", type=output_folder, help="folder for the result")
    options = parser.parse_args()
    model = options.model or str(embedded_pair().target)
    kinds = kinds_of(options.ranks, options.threads)
    try:
        for kind in kinds:  # before any of them is loaded
            if kind.sums is not None:
                load_sharding(kind.options(model), kind.sums)
    except UnsupportedModelError as error:
        parser.error(f"--ranks: {error}")
    found = measure(model, kinds, options)
    tables = {
        "passes": [times(its) for its in found],
        "collectives": [exchanges(its) for its in found if its.kind.sums is not None],
        "memory": [memory(its, found[0]) for its in found],
        "equality": [equality(its, found[0]) for its in found],
    }
    for name, rows in tables.items():
        show(TITLES[name], rows)
    result = {"model": "/".join(Path(model).parts[-2:]), "threads": options.threads, "load_average": os.getloadavg()[0]}
    finish("tensor_parallel", {**result, **tables}, options.output)


def kinds_of(ranks: list[int], threads: int) -> list[Kind]:
    """The kinds of engines to compare; the first is one process with all threads, with which others are compared."""
    shared = {count: max(1, threads // count) for count in sorted({1, *ranks})}
    alone = [Kind(1, None, own) for own in sorted(set(shared.values()), reverse=True)]
    return alone + [Kind(count, sums, own) for count, own in shared.items() if count > 1 for sums in SUMS]


@dataclass(frozen=True)
class Measured:
    """What was measured of an engine."""

    kind: Kind
    start: Start
    plain: Answers
    drafted: Answers
    timings: dict[str, list[Timing]]
    """By the names of `PASSES`."""
    memory: Memory


def measure(model: str, kinds: list[Kind], options: argparse.Namespace) -> list[Measured]:
    """Loads all engines one after the other, and measures them in turns."""
    longest = MAX_MODEL_LEN - options.max_tokens
    prompts = [its[:longest] for its in token_ids(Path(model), load_prompts(options.prompts, options.num_prompts))]
    with ExitStack() as stack:
        engines = [stack.enter_context(MeasuredEngine(model, kind)) for kind in progress(kinds, "loading")]
        answers = [engine.answers(prompts, options.max_tokens) for engine in progress(engines, "answers")]
        timings: list[dict[str, list[Timing]]] = [{name: [] for name in PASSES} for _ in engines]
        for _ in progress(range(options.repeats), "passes"):
            for name, shape in PASSES.items():
                for engine, its in zip(engines, timings, strict=True):
                    its[name].append(engine.fastest(shape, options.steps))
        return [
            Measured(engine.kind, engine.start, *its_answers, its_timings, engine.memory())
            for engine, its_answers, its_timings in zip(engines, answers, timings, strict=True)
        ]


def times(measured: Measured) -> Row:
    """Milliseconds of each pass."""
    return {
        **_named(measured.kind),
        **{
            name: round(1000 * statistics.median(its.seconds for its in found), 1)
            for name, found in measured.timings.items()
        },
    }


def exchanges(measured: Measured) -> Row:
    """The collectives of a pass, and their share of each pass in percent."""
    shares = {
        name: round(100 * statistics.median(its.collective_seconds / its.seconds for its in found), 1)
        for name, found in measured.timings.items()
    }
    (count,) = {its.collectives for found in measured.timings.values() for its in found}
    return {**_named(measured.kind), "count": count, **{f"{name}, %": share for name, share in shares.items()}}


def memory(measured: Measured, alone: Measured) -> Row:
    """Weights and memory of each rank, and the time to load."""
    its, whole_model = measured.memory, alone.memory
    return {
        **_named(measured.kind),
        "weights": _mib(its.weights),
        "weights, part": round(max(its.weights) / whole_model.weights[0], 3),
        "resident": _mib(its.resident),
        "resident, part": round(max(its.resident) / whole_model.resident[0], 3),
        "rank 0 before loading": _mib([measured.start.before]),
        "seconds to load": round(measured.start.seconds, 1),
    }


def equality(measured: Measured, alone: Measured) -> Row:
    """Whether tokens and logits are those of one process, and drafts change nothing."""
    plain, drafted, truth = measured.plain, measured.drafted, alone.plain
    return {
        **_named(measured.kind),
        "self-test": "bitwise" if measured.start.bitwise else "not bitwise",
        "plain ids": _answer(plain.token_ids == truth.token_ids),
        "plain logits": _answer(plain.logits == truth.logits),
        "speculative ids": _answer(drafted.token_ids == truth.token_ids),
        "speculative logits": _answer(drafted.logits == truth.logits),
        "speculative = own plain": _answer(drafted == plain),
    }


def _named(kind: Kind) -> Row:
    return {"ranks": kind.ranks, "sums": kind.sums, "threads each": kind.threads}


def _mib(counts: list[int]) -> str:
    return " + ".join(str(round(count / MIB)) for count in counts)


def _answer(equal: bool) -> str:
    return "equal" if equal else "differ"


if __name__ == "__main__":
    main()
