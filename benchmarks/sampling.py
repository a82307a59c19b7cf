"""Cost of sampling, on a CPU or a GPU, and how often a draft that shares the target's noise makes the same choice.

    python -m benchmarks.sampling [--target FOLDER] [--draft FOLDER] [--prompts FILE] [--device cuda] [--output FOLDER]

On a GPU it measures only the cost of choosing a token for all rows of a batch together. Otherwise both models see the
prompts with the target's greedy answers, and draw with the same seeds at each position of an answer. The table compares
the agreement with the lower bound of shared noise, (1 - TV) / (1 + TV) (Daliri, Musco and Suresh, 2025), with the upper
bound of any method, 1 - TV, and with a draft that has noise of its own. `--skip-layer` makes a second draft, the target
without that layer, which stands for a good one. The last line printed is JSON.
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
from specpool.engine.config.devices import use_device
from specpool.engine.config.sources import UnsupportedModelError
from specpool.engine.models.embedded_pair import embedded_pair
from specpool.engine.sampling.sampler import choose_batch, choose_token
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
BATCHES = (1, 8, 64, 256)


def main() -> None:
    """Parses the command line, measures, prints."""
    parser = parser_of(__doc__)
    pair = embedded_pair()
    parser.add_argument("--target", default=str(pair.target))
    parser.add_argument("--draft", default=str(pair.draft))
    add_prompts(parser)
    parser.add_argument("--num-prompts", type=whole(1, 10_000), default=32)
    parser.add_argument("--max-tokens", type=whole(1, 4000), default=16)
    parser.add_argument("--seeds", type=whole(1, 10_000), default=20, help="draws at each position")
    parser.add_argument("--skip-layer", type=whole(0, 1000), default=25)
    parser.add_argument("--device", default="cpu", help="on a GPU: cost of batches of random logits")
    parser.add_argument("--vocab-size", type=whole(2, 2**20), default=151_936, help="vocabulary of these logits")
    parser.add_argument("--output", type=output_folder, help="folder for the result")
    options = parser.parse_args()
    try:
        device = use_device(options.device)
    except UnsupportedModelError as error:
        parser.error(f"--device: {error}")
    if device.type != "cpu":
        finish("sampling-batches", {"batches": batches(options.device, options.vocab_size)}, options.output)
        return
    target, rows_of = rows_to_choose_from(options)
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
def rows_to_choose_from(options: argparse.Namespace) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Logits at the positions of the answers: of the target, and of each draft by name. [positions, vocab_size]"""
    peers = Peers(options.target)
    drafts = {
        "the draft": Peers(options.draft).model.eval(),
        f"target without layer {options.skip_layer}": without_layer(peers.model, options.skip_layer),
    }
    models = {"target": peers.model, **drafts}
    found: dict[str, list[torch.Tensor]] = {name: [] for name in models}
    for line in progress(load_prompts(options.prompts, options.num_prompts), "prompts"):
        prompt = peers.encode(line.prompt)
        (answer,) = peers.generate([line.prompt], 1, options.max_tokens)
        for name, model in models.items():
            logits = model(torch.tensor([prompt + answer[:-1]]), use_cache=False).logits[0]
            found[name].append(logits[len(prompt) - 1 :])
    rows = {name: torch.cat(logits) for name, logits in found.items()}
    return rows.pop("target"), rows


def without_layer(model: PreTrainedModel, layer: int) -> PreTrainedModel:
    """A copy that lacks one layer."""
    shorter = copy.deepcopy(model)
    del shorter.model.layers[layer]
    return shorter


def cost(logits: torch.Tensor, rules: Mapping[str, Any]) -> float:
    """Median milliseconds of one choice."""
    context = [i % 1000 for i in range(CONTEXT_TOKENS)]
    params = SamplingParams(**rules, prompt_length=CONTEXT_TOKENS // 2)
    seconds = [seconds_of(lambda: choose_token(logits, params, context)) for _ in range(CHOICES)]
    return round(statistics.median(seconds) * 1000, 2)


def batches(device: str, vocab_size: int) -> list[dict[str, Any]]:
    """Costs by number of rows of random bfloat16 logits, all with the same rules."""
    found = []
    for rows in BATCHES:
        logits = (torch.randn(rows, vocab_size) * 3).to(device, torch.bfloat16)
        costs = {name: batch_cost(logits, rules) for name, rules in RULES.items()}
        found.append({"rows": rows, **{f"{name} ms": milliseconds for name, milliseconds in costs.items()}})
    show(f"choosing tokens of {vocab_size} on {device}, all rows together", found)
    return found


def batch_cost(logits: torch.Tensor, rules: Mapping[str, Any]) -> float:
    """Median milliseconds of choosing a token for every row; each row is a sequence of its own."""
    context = [i % 1000 for i in range(CONTEXT_TOKENS)]
    params = [SamplingParams(**rules, seed=row, prompt_length=CONTEXT_TOKENS // 2) for row in range(len(logits))]
    sequences = [(each, context, 1) for each in params]
    choose_batch(logits, sequences)  # compiles the kernels
    seconds = [seconds_of(lambda: choose_batch(logits, sequences)) for _ in range(CHOICES)]
    return round(statistics.median(seconds) * 1000, 3)


def agreement(target: torch.Tensor, draft: torch.Tensor, temperature: float, seeds: int) -> dict[str, float]:
    """Share of equal draws, the bounds, and the share with independent noise: means over the positions."""
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
