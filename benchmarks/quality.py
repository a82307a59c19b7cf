"""Measure how much int8 activations change a model's predictions, compared with float32 activations.

    python -m benchmarks.quality [--model FILE] [--prompts FILE] [--num-prompts 32] [--tokens 20] [--output FOLDER]

The model is loaded twice, and both engines read the same texts: the prompts, each followed by the float32 engine's
greedy answer. The table shows the Kullback-Leibler divergence, in nats, of the int8 next-token distribution from the
float32 one; the share of positions with the same most probable token; and the log-likelihood of the texts under each
engine. All are means over positions, except the largest divergence. The last line printed is JSON.
"""

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.prompts import add_prompts, checked, load_prompts
from benchmarks.report import console, finish, output_folder, parser_of, progress, show, whole
from coordinator.prompts.templates import ChatTemplateError
from coordinator.prompts.tokenizer import EncodingError
from specpool.engine.cache.spans import Span
from specpool.engine.config.options import FLOAT32, INT8, Activations, EngineOptions, Int8RefusedError
from specpool.engine.config.sources import UnsupportedModelError
from specpool.engine.models.embedded_pair import embedded_pair
from specpool.engine.run.engine import Engine
from specpool.engine.startup.loading import load_unproven_engine
from specpool.planning.answers import PromptError, encode_prompts

GOAL_KL = 0.005
"""Maximum mean divergence in nats."""
ROWS = 256
"""Positions whose logits are compared at a time."""

Row = dict[str, Any]


@dataclass(frozen=True)
class Differences:
    """Predictions of each next token [n], by both engines."""

    divergence: torch.Tensor
    is_same: torch.Tensor
    """Whether the most probable token is the same."""
    likelihoods: torch.Tensor
    """[2, n]: log-likelihood with float32 and int8. Minus infinity for tokens without an output in the model."""

    def part(self, some: slice) -> "Differences":
        return Differences(self.divergence[some], self.is_same[some], self.likelihoods[:, some])


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--model", help="GGUF file or folder with quantized weights; default: the embedded target")
    add_prompts(parser)
    parser.add_argument("--num-prompts", type=whole(1, 10_000), default=32)
    parser.add_argument("--tokens", type=whole(1, 4000), default=20, help="maximum tokens of an answer")
    parser.add_argument("--threads", type=whole(1, 1024), default=torch.get_num_threads())
    parser.add_argument("--output", type=output_folder, help="folder for the result")
    options = parser.parse_args()
    lines = checked(parser, lambda: load_prompts(options.prompts, options.num_prompts))
    model = options.model or str(embedded_pair().target)
    try:
        engines = load(model, INT8, options), load(model, FLOAT32, options)  # int8 first: it may be refused
        prompts = encode_prompts(engines[1], lines, options.tokens)
    except Int8RefusedError as error:
        remedy = error.remedy and f"; {error.remedy}"
        parser.error(f"--model: int8 activations, which this benchmark compares, need {error.needed}{remedy}")
    except UnsupportedModelError as error:
        parser.error(f"--model: {error}")
    except (PromptError, ChatTemplateError, EncodingError) as error:
        parser.error(f"--prompts: {error}")
    report(model, engines[1], engines[0], prompts, options)


def load(model: str, activations: Activations, options: argparse.Namespace) -> Engine:
    console.print(f"loading the model with {activations} activations")
    return load_unproven_engine(
        EngineOptions(
            model=model, device="cpu", activations=activations, threads=options.threads, max_sequences=1
        ),
        exact=True,
    )  # fmt: skip


def report(
    model: str, float32: Engine, int8: Engine, prompts: Sequence[list[int]], options: argparse.Namespace
) -> None:
    of_prompts, of_answers = [], []
    for prompt in progress(prompts, "texts"):
        found = compare(float32, int8, prompt + answer(float32, prompt, options.tokens))
        of_prompts.append(found.part(slice(0, len(prompt) - 1)))
        of_answers.append(found.part(slice(len(prompt) - 1, None)))
    parts = {"prompts": of_prompts, "answers": of_answers, "both": of_prompts + of_answers}
    rows = [summary(name, found) for name, found in parts.items()]
    show("int8 activations, compared with float32", rows)
    goal_is_met = rows[-1]["kl"] <= GOAL_KL
    result = {
        "model": "/".join(Path(model).parts[-2:]), "prompts": len(prompts), "tokens": options.tokens,
        "weight_kinds": dict(int8.info().weight_kinds), "goal_kl": GOAL_KL, "goal_is_met": goal_is_met, "rows": rows,
    }  # fmt: skip
    finish("quality", result, options.output)


@torch.inference_mode()
def answer(engine: Engine, prompt: list[int], max_tokens: int) -> list[int]:
    tokens: list[int] = []
    span = Span(0, 0, prompt, 1)
    while True:
        tokens += engine.head.token_ids(engine.forward([span]).argmax(-1)).tolist()
        if len(tokens) == max_tokens or tokens[-1] in engine.loaded.tokenizer.eos_token_ids:
            return tokens
        span = Span(0, span.end, tokens[-1:], 1)


@torch.inference_mode()
def compare(float32: Engine, int8: Engine, token_ids: list[int]) -> Differences:
    """The predictions of each token of a text after the first."""
    pieces = []
    for spans, following in steps(token_ids):
        ours, others = (engine.head.over_vocabulary(engine.forward(spans)).double() for engine in (float32, int8))
        p, q = ours.log_softmax(-1), others.log_softmax(-1)
        terms = torch.where(p > -torch.inf, p.exp() * (p - q), 0.0)  # a partial head gives other tokens -inf
        likelihoods = torch.stack([p, q]).gather(2, following.expand(2, -1)[..., None])[..., 0]
        pieces.append(Differences(terms.sum(-1), ours.argmax(-1) == others.argmax(-1), likelihoods))
    return joined(pieces)


def steps(token_ids: list[int]) -> Iterator[tuple[list[Span], torch.Tensor]]:
    """Passes over a text, and the tokens [n] that follow the tokens of each pass."""
    for start in range(0, len(token_ids) - 1, ROWS):
        tokens = token_ids[start : min(start + ROWS, len(token_ids) - 1)]
        following = token_ids[start + 1 : start + 1 + len(tokens)]
        yield [Span(0, start, tokens, len(tokens))], torch.tensor(following)


def joined(parts: Sequence[Differences]) -> Differences:
    return Differences(
        torch.cat([part.divergence for part in parts]),
        torch.cat([part.is_same for part in parts]),
        torch.cat([part.likelihoods for part in parts], 1),
    )


def summary(name: str, parts: Sequence[Differences]) -> Row:
    """A row of the table: means over all positions, and the largest divergence."""
    found = joined(parts)
    known = found.likelihoods[:, found.likelihoods.isfinite().all(0)].mean(1).tolist()
    return {
        "text": name,
        "positions": len(found.divergence),
        "kl": significant(found.divergence.mean().item()),
        "largest_kl": significant(found.divergence.max().item()),
        "same_most_probable": round(found.is_same.double().mean().item(), 4),
        **{f"log_likelihood_{kind}": round(mean, 4) for kind, mean in zip((FLOAT32, INT8), known, strict=True)},
    }


def significant(number: float) -> float:
    return float(f"{number:.3g}")


if __name__ == "__main__":
    main()
