"""Compare a model sharded among ranks with the same model in one process, on a CPU.

    python -m benchmarks.tensor_parallel [--model FOLDER] [--ranks 1 2] [--repeats 5] [--output FOLDER]

For each number of ranks and kind of sums, it measures the time of passes, the share of collectives, memory and load
time. It also compares token ids and logits with one process. The ranks share the machine's threads evenly. One process
runs with all threads, and with as few as a rank has. All engines stay loaded and take turns; the tables show medians.
Rank 0 times the collectives, and includes waiting for slower ranks. `python -m benchmarks.tensor_parallel_estimate`
estimates passes on GPUs. The last line printed is JSON.
"""

import argparse
import os
import statistics
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.prompts import add_prompts, load_prompts, token_ids
from benchmarks.report import finish, output_folder, parser_of, progress, show, whole
from benchmarks.sharded_engine import (
    MAX_MODEL_LEN,
    MAX_SEQUENCES,
    Answers,
    Kind,
    MeasuredEngine,
    Memory,
    Pass,
    Start,
    Timing,
)  # fmt: skip
from specpool.engine.config.options import MAX_RANKS
from specpool.engine.config.sources import UnsupportedModelError
from specpool.engine.models.embedded_pair import embedded_pair
from specpool.engine.sharding.shares import Sums
from specpool.engine.startup.sharded import load_sharding
from specpool.environment.cpus import usable_cpus

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
    "memory": "MiB of each rank, and the largest rank as a fraction of one process",
    "equality": "compared with one process that decodes token by token",
}

Row = dict[str, Any]


def main() -> None:
    """Parse the command line and run the benchmark."""
    parser = parser_of(__doc__)
    parser.add_argument("--model", help="folder; by default the embedded target")
    parser.add_argument("--ranks", type=whole(1, MAX_RANKS), nargs="+", default=[1, 2], help="1 is always included")
    parser.add_argument("--threads", type=whole(1, 1024), default=usable_cpus(), help="of all ranks")
    parser.add_argument("--repeats", type=whole(1, 1000), default=5)
    parser.add_argument("--steps", type=whole(1, 1000), default=3, help="passes per repeat; the fastest counts")
    add_prompts(parser)
    parser.add_argument("--num-prompts", type=whole(1, MAX_SEQUENCES), default=8)
    parser.add_argument("--max-tokens", type=whole(1, 128), default=24, help="tokens of each answer")
    parser.add_argument("--output", type=output_folder, help="folder for the result")
    options = parser.parse_args()
    model = options.model or str(embedded_pair().target)
    kinds = kinds_of(options.ranks, options.threads)
    try:
        for kind in kinds:  # check all of them before loading any
            if kind.sums is not None:
                load_sharding(kind.options(model), kind.sums)
    except UnsupportedModelError as error:
        parser.error(f"--ranks: {error}")
    found = measure(model, kinds, options)
    tables = {
        "passes": [times(each) for each in found],
        "collectives": [exchanges(each) for each in found if each.kind.sums is not None],
        "memory": [memory(each, found[0]) for each in found],
        "equality": [equality(each, found[0]) for each in found],
    }
    for name, rows in tables.items():
        show(TITLES[name], rows)
    result = {"model": "/".join(Path(model).parts[-2:]), "threads": options.threads, "load_average": os.getloadavg()[0]}
    finish("tensor_parallel", {**result, **tables}, options.output)


def kinds_of(ranks: list[int], threads: int) -> list[Kind]:
    """The kinds of engines; the first one, a process with all threads, is the baseline."""
    shared = {count: max(1, threads // count) for count in sorted({1, *ranks})}
    alone = [Kind(1, None, own) for own in sorted(set(shared.values()), reverse=True)]
    return alone + [Kind(count, sums, own) for count, own in shared.items() if count > 1 for sums in SUMS]


@dataclass(frozen=True)
class Measured:
    """Everything measured of an engine."""

    kind: Kind
    start: Start
    plain: Answers
    drafted: Answers
    timings: dict[str, list[Timing]]
    """By name in `PASSES`."""
    memory: Memory


def measure(model: str, kinds: list[Kind], options: argparse.Namespace) -> list[Measured]:
    """Load all engines one after another and measure them in turns."""
    max_prompt = MAX_MODEL_LEN - options.max_tokens
    lines = load_prompts(options.prompts, options.num_prompts)
    prompts = [prompt[:max_prompt] for prompt in token_ids(Path(model), lines)]
    with ExitStack() as stack:
        engines = [stack.enter_context(MeasuredEngine(model, kind)) for kind in progress(kinds, "loading")]
        answers = [engine.answers(prompts, options.max_tokens) for engine in progress(engines, "answers")]
        timings: list[dict[str, list[Timing]]] = [{name: [] for name in PASSES} for _ in engines]
        for _ in progress(range(options.repeats), "passes"):
            for name, shape in PASSES.items():
                for engine, by_pass in zip(engines, timings, strict=True):
                    by_pass[name].append(engine.fastest(shape, options.steps))
        return [
            Measured(engine.kind, engine.start, plain, drafted, by_pass, engine.memory())
            for engine, (plain, drafted), by_pass in zip(engines, answers, timings, strict=True)
        ]


def times(measured: Measured) -> Row:
    """Milliseconds of each pass."""
    medians = {name: statistics.median(each.seconds for each in found) for name, found in measured.timings.items()}
    return {**_named(measured.kind), **{name: round(1000 * seconds, 1) for name, seconds in medians.items()}}


def exchanges(measured: Measured) -> Row:
    """The collectives of a pass, and their share of each pass in percent."""
    shares = {
        name: round(100 * statistics.median(each.collective_seconds / each.seconds for each in found), 1)
        for name, found in measured.timings.items()
    }
    (count,) = {each.collectives for found in measured.timings.values() for each in found}
    return {**_named(measured.kind), "count": count, **{f"{name}, %": share for name, share in shares.items()}}


def memory(measured: Measured, alone: Measured) -> Row:
    """Weights and memory of each rank, and the time to load."""
    own, baseline = measured.memory, alone.memory
    return {
        **_named(measured.kind),
        "weights": _mib(own.weights),
        "weights, part": round(max(own.weights) / baseline.weights[0], 3),
        "resident": _mib(own.resident),
        "resident, part": round(max(own.resident) / baseline.resident[0], 3),
        "rank 0 before loading": _mib([measured.start.before]),
        "seconds to load": round(measured.start.seconds, 1),
    }


def equality(measured: Measured, alone: Measured) -> Row:
    """Whether tokens and logits equal those of one process and do not depend on drafts."""
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
