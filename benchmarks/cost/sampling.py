"""Measure how long a worker takes to choose the tokens of a pass, in compiled code and with torch operations.

The logits are random and have the spread of a language model's; "flat" rules raise the temperature until most tokens
count. The fastest of the repeats counts.
"""

import argparse
import random
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from benchmarks.report import finish, parser_of, progress, seconds_of, show, whole
from specpool.engine.sampling.batch import Sampler, compiled_is_exact
from specpool.engine.sampling.head import Head
from specpool.engine.sampling.rows import SequenceRows
from specpool.engine.sampling.rules import SequenceRules
from specpool.protocol.sampling import SamplingParams

SPREAD, CONTEXT_TOKENS, BIASES, TOP = 2.5, 512, 1024, 20
BIASED = {"logit_bias": tuple((7 * token, 1.0) for token in range(BIASES))}
PENALTIES = {"repetition_penalty": 1.1, "frequency_penalty": 0.2, "presence_penalty": 0.1}
ALL: Mapping[str, Any] = {"temperature": 1.0, "top_k": 200, "top_p": 0.95, "min_p": 0.01, **PENALTIES, **BIASED}
RULES: Mapping[str, tuple[Mapping[str, Any] | None, int | None]] = {
    "greedy": (None, None),
    "greedy, 20 log-probabilities": (None, TOP),
    "greedy, 1,024 biases": (BIASED, None),
    "temperature": ({"temperature": 1.0}, None),
    "top_k 50": ({"temperature": 1.0, "top_k": 50}, None),
    "top_p 0.95": ({"temperature": 1.0, "top_p": 0.95}, None),
    "top_p 0.95, flat": ({"temperature": 10.0, "top_p": 0.95}, None),
    "top_k 20,000, flat": ({"temperature": 10.0, "top_k": 20_000}, None),
    "all rules": (ALL, None),
    "all rules, 20 log-probabilities": (ALL, TOP),
}
"""Sampling parameters, and the number of log-probabilities."""


def main(arguments: Sequence[str]) -> None:
    """Parse the command line and run the benchmark."""
    parser = parser_of(__doc__, prog="python -m benchmarks.cost --of sampling")
    parser.add_argument("--rows", type=whole(1, 1024), default=16, help="sequences of the pass, with one row each")
    parser.add_argument("--vocab-size", type=whole(BIASES * 7, 2**20), default=49_152)
    parser.add_argument("--threads", type=whole(1, 1024), default=torch.get_num_threads())
    parser.add_argument("--repeats", type=whole(1, 10_000), default=50)
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    rows = [{"rules": name, **cost(*RULES[name], options)} for name in progress([*RULES], "rules")]
    show(f"ms for {options.rows} rows of {options.vocab_size} logits, {options.threads} threads", rows)
    result = {"rows": options.rows, "vocab_size": options.vocab_size, "threads": options.threads, "costs": rows}
    finish("sampling_cost", {**result, "compiled": compiled_is_exact()}, None)


def cost(rules: Mapping[str, Any] | None, num_logprobs: int | None, options: argparse.Namespace) -> dict[str, float]:
    """Milliseconds of a pass."""
    generator, numbers = torch.Generator().manual_seed(0), random.Random(0)
    logits = torch.randn(options.rows, options.vocab_size, generator=generator) * SPREAD
    sequences = [
        SequenceRows(rules_of(rules, seed), numbers.choices(range(5000), k=CONTEXT_TOKENS), 1, num_logprobs)
        for seed in range(options.rows)
    ]
    head, device = Head(options.vocab_size), logits.device
    samplers = {"compiled_ms": Sampler(head, device), "torch_ms": Sampler(head, device, native=False)}
    return {name: fastest(partial(each, logits, sequences), options) for name, each in samplers.items()}


def rules_of(rules: Mapping[str, Any] | None, seed: int) -> SequenceRules | None:
    """The rules of a sequence."""
    if rules is None:
        return None
    return SequenceRules(SamplingParams(**{**rules, "seed": seed, "prompt_length": CONTEXT_TOKENS // 2}))


def fastest(choose: Callable[[], object], options: argparse.Namespace) -> float:
    """Milliseconds of the fastest of several calls."""
    return round(1000 * min(seconds_of(choose) for _ in range(options.repeats)), 2)
