"""Measure drafts of the draft worker's model, in one call of compiled code and step by step.

Every sequence has a cached prompt. The fastest of the repeats counts; a step is the difference between a draft of all
tokens and one of a single token.
"""

import argparse
import time
from collections.abc import Mapping, Sequence
from typing import Any
from unittest import mock

from benchmarks.report import finish, parser_of, progress, show, whole, wholes
from draft_worker.proposer import Proposer
from specpool.engine.config.options import EngineOptions
from specpool.engine.models.embedded_pair import EMBEDDED_DRAFT
from specpool.engine.run.engine import Engine
from specpool.engine.startup.loading import load_engine
from specpool.protocol.rounds import ProposeItem, ProposeRound
from specpool.protocol.sampling import SamplingParams

CHANCES = tuple((i + 1) / 10 for i in range(10))
SURE = 1e-9
"""A minimum chance that never ends a draft, but asks for confidences."""
RULES: Mapping[str, tuple[SamplingParams | None, float]] = {
    "greedy": (None, 0.0),
    "greedy, with confidences": (None, SURE),
    "top_p 0.95": (SamplingParams(0.8, top_p=0.95, seed=3), 0.0),
    "top_p 0.95, penalties": (SamplingParams(0.8, top_p=0.95, repetition_penalty=1.1, seed=3), 0.0),
}


def main(arguments: Sequence[str]) -> None:
    """Parse the command line and run the benchmark."""
    parser = parser_of(__doc__, prog="python -m benchmarks.cost --of draft")
    parser.add_argument("--draft", default=EMBEDDED_DRAFT)
    parser.add_argument("--activations", choices=("auto", "float32", "int8"), default="auto")
    parser.add_argument("--threads", type=whole(1, 1024))
    parser.add_argument("--sequences", type=wholes(1, 64), default=[1, 4, 8])
    parser.add_argument("--k", type=whole(2, 16), default=4, help="draft tokens")
    parser.add_argument("--prompt", type=whole(1, 1024), default=128, help="cached tokens of each sequence")
    parser.add_argument("--repeats", type=whole(1, 10_000), default=200)
    options = parser.parse_args(arguments)
    engine = load_engine(
        EngineOptions(
            model=options.draft,
            activations=options.activations,
            threads=options.threads,
            max_sequences=max(options.sequences),
            max_model_len=options.prompt + 64,
        ),
        exact=False,
    )
    cases = [(name, count) for name in RULES for count in options.sequences]
    rows = [
        {"rules": name, "sequences": count, **cost(engine, count, *RULES[name], options)}
        for name, count in progress(cases, "cases")
    ]
    show(f"ms of a draft of {options.k} tokens, and of each further token", rows)
    result = {"draft": engine.loaded.name, "activations": engine.info().activations, "k": options.k, "rows": rows}
    finish("draft_cost", {**result, "repeats": options.repeats}, None)


def cost(
    engine: Engine, count: int, sampling: SamplingParams | None, min_chance: float, options: argparse.Namespace
) -> dict[str, float]:
    """Milliseconds of a draft and of a further token, with the draft loop of the engine and without."""
    rounds = Rounds(Proposer(engine), count, sampling, min_chance, options.prompt)
    figures: dict[str, float] = {}
    for _ in range(options.repeats):
        for name, can_draft in (("loop", engine.can_draft), ("steps", lambda _: False)):
            with mock.patch.object(engine, "can_draft", can_draft):
                times = {k: 1000 * rounds.draft(k) for k in (1, options.k)}
            figures[f"{name}_ms"] = min(times[options.k], figures.get(f"{name}_ms", times[options.k]))
            figures[f"{name}_first_ms"] = min(times[1], figures.get(f"{name}_first_ms", times[1]))
    for name in ("loop", "steps"):
        further = (figures[f"{name}_ms"] - figures.pop(f"{name}_first_ms")) / (options.k - 1)
        figures[f"{name}_further_ms"] = further
    rounds.end()
    return {name: round(value, 2) for name, value in figures.items()}


class Rounds:
    """Rounds of sequences whose prompts are cached."""

    def __init__(
        self, proposer: Proposer, count: int, sampling: SamplingParams | None, min_chance: float, prompt: int
    ) -> None:
        """`prompt`: its number of tokens."""
        self._proposer, self._count, self._min_chance, self._prompt = proposer, count, min_chance, prompt
        self._round_id = 0
        vocab_size = proposer.engine.vocab_size
        token_ids = tuple((7 * i * i + 3 * i) % vocab_size for i in range(prompt))
        self._propose(0, {"token_ids": token_ids, "max_length": prompt + 64, "sampling": sampling})

    def draft(self, num_draft_tokens: int) -> float:
        """Seconds of a round of drafts after the prompt and one token."""
        began = time.perf_counter()
        self._propose(self._prompt, {"token_ids": (5,), "num_draft_tokens": num_draft_tokens})
        return time.perf_counter() - began

    def end(self) -> None:
        """Free the sequences."""
        self._proposer.engine.slots.release([("benchmark", i) for i in range(self._count)])
        self._proposer.engine.slots.drop_released()

    def _propose(self, base_length: int, fields: Mapping[str, Any]) -> None:
        self._round_id += 1
        items = [
            ProposeItem(i, base_length, **{"num_draft_tokens": 0, "min_chance": self._min_chance, **fields})
            for i in range(self._count)
        ]
        self._proposer.propose([ProposeRound("benchmark", self._round_id, items, CHANCES, 0.0)])
