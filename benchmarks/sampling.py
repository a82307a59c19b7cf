"""Measure the cost of sampling, and how often draft and target sample the same token.

    python -m benchmarks.sampling [--target FOLDER] [--draft FOLDER] [--prompts FILE] [--output FOLDER]

Both models read the prompts with the target's greedy answers. At each position of an answer, they sample with the same
seeds, so they share their noise. The table has the share of equal tokens (shared noise), its lower bound
(1 - TV) / (1 + TV) (Daliri, Musco and Suresh, 2025), the upper bound of any method, 1 - TV, and the agreement of drafts
with independent noise (own noise). `--skip-layer` adds a second draft that stands for a good one: the target without
that layer. The last line printed is JSON.
"""

import argparse
import copy
import statistics
from collections.abc import Mapping
from typing import Any

import torch
from transformers import PreTrainedModel

from benchmarks.peers import Peers
from benchmarks.prompts import add_prompts, load_prompts
from benchmarks.report import finish, output_folder, parser_of, progress, seconds_of, show, whole
from specpool.engine.models.embedded_pair import embedded_pair
from specpool.engine.sampling.sampler import choose_token
from specpool.protocol.sampling import SamplingParams

RULES: Mapping[str, Mapping[str, Any]] = {
    "greedy": {},
    "temperature": {"temperature": 1.0},
    "top_k 50": {"temperature": 1.0, "top_k": 50},
    "top_p 0.95": {"temperature": 1.0, "top_p": 0.95},
    "min_p 0.05": {"temperature": 1.0, "min_p": 0.05},
    "top_p, penalties": {"temperature": 1.0, "top_p": 0.95, "repetition_penalty": 1.1, "frequency_penalty": 0.2},
}
TEMPERATURES = (0.5, 1.0)
CONTEXT_TOKENS, CHOICES = 512, 50


def main() -> None:
    """Parse the command line and run the benchmark."""
    parser = parser_of(__doc__)
    pair = embedded_pair()
    parser.add_argument("--target", default=str(pair.target))
    parser.add_argument("--draft", default=str(pair.draft))
    add_prompts(parser)
    parser.add_argument("--num-prompts", type=whole(1, 10_000), default=32)
    parser.add_argument("--max-tokens", type=whole(1, 4000), default=16)
    parser.add_argument("--seeds", type=whole(1, 10_000), default=20, help="draws at each position")
    parser.add_argument("--skip-layer", type=whole(0, 1000), default=25)
    parser.add_argument("--output", type=output_folder, help="folder for the result")
    options = parser.parse_args()
    target, rows_of = logits_at_answers(options)
    costs = [{"rules": name, "ms_per_token": cost(target[0], rules)} for name, rules in RULES.items()]
    show(f"choosing a token of {target.shape[1]}, one row, {torch.get_num_threads()} threads", costs)
    plan = [(name, temperature) for name in rows_of for temperature in TEMPERATURES]
    agreements = [
        {"draft": name, "temperature": temperature, **agreement(target, rows_of[name], temperature, options.seeds)}
        for name, temperature in progress(plan, "drafts")
    ]
    show(f"agreement at {len(target)} positions, {options.seeds} seeds each", agreements)
    result = {"positions": len(target), "seeds": options.seeds, "costs": costs, "agreement": agreements}
    finish("sampling", result, options.output)


@torch.inference_mode()
def logits_at_answers(options: argparse.Namespace) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Logits of the target, and logits of each draft by name: [positions of the answers, vocab_size]."""
    peers = Peers(options.target)
    drafts = {
        "the draft": Peers(options.draft).model.eval(),
        f"target without layer {options.skip_layer}": without_layer(peers.model, options.skip_layer),
    }
    models = {"target": peers.model, **drafts}
    logits_of: dict[str, list[torch.Tensor]] = {name: [] for name in models}
    for line in progress(load_prompts(options.prompts, options.num_prompts), "prompts"):
        prompt = peers.encode(line.prompt)
        (answer,) = peers.generate([line.prompt], 1, options.max_tokens)
        for name, model in models.items():
            logits = model(torch.tensor([prompt + answer[:-1]]), use_cache=False).logits[0]
            logits_of[name].append(logits[len(prompt) - 1 :])
    rows = {name: torch.cat(logits) for name, logits in logits_of.items()}
    return rows.pop("target"), rows


def without_layer(model: PreTrainedModel, layer: int) -> PreTrainedModel:
    """A copy of the model without one layer."""
    shorter = copy.deepcopy(model)
    del shorter.model.layers[layer]
    return shorter


def cost(logits: torch.Tensor, rules: Mapping[str, Any]) -> float:
    """Median milliseconds to sample one token."""
    context = [i % 1000 for i in range(CONTEXT_TOKENS)]
    params = SamplingParams(**rules, prompt_length=CONTEXT_TOKENS // 2)
    seconds = [seconds_of(lambda: choose_token(logits, params, context)) for _ in range(CHOICES)]
    return round(statistics.median(seconds) * 1000, 2)


def agreement(target: torch.Tensor, draft: torch.Tensor, temperature: float, seeds: int) -> dict[str, float]:
    """Mean agreement over the positions, with its bounds."""
    same = 0
    for position, (row, other) in enumerate(zip(target, draft, strict=True)):
        context = [0] * position  # the noise depends only on its length
        for seed in range(seeds):
            params = SamplingParams(temperature=temperature, seed=seed)
            same += choose_token(row, params, context) == choose_token(other, params, context)
    p, q = (target / temperature).softmax(-1), (draft / temperature).softmax(-1)
    distance = (p - q).abs().sum(-1) / 2
    return {
        "shared_noise": round(same / (len(target) * seeds), 4),
        "bound": round(float(((1 - distance) / (1 + distance)).mean()), 4),
        "1 - TV": round(float((1 - distance).mean()), 4),
        "own_noise": round(float((p * q).sum(-1).mean()), 4),
    }


if __name__ == "__main__":
    main()
