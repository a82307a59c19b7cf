"""Compare steps of a hybrid model with transformers. Three of four layers are gated delta nets; the others attend.

    python -m benchmarks.hybrid [--shape qwen3.5-0.8b] [--layers N] [--threads N] [--repeats 5] [--output FOLDER]

Both run the same random weights and the same tokens, in float32. The weights are rounded to bfloat16, in which such
models are published. A plain step has one token per sequence. A verification has k + 1 tokens, and replays k accepted
draft tokens of the last round, the maximum. Runs are interleaved; the table shows medians. `state_mib` compares the
recurrent state that a sequence keeps with one state and the inputs of 64 positions. The last line printed is JSON.
"""

import argparse
import statistics
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import replace
from functools import partial
from itertools import count
from typing import Any

import torch
from transformers import DynamicCache, PreTrainedModel

from benchmarks.report import finish, output_folder, parser_of, progress, seconds_of, show, whole
from benchmarks.shapes import HYBRID_SHAPES, random_loaded, random_model
from specpool.engine.cache.spans import Span
from specpool.engine.config.options import EngineOptions
from specpool.engine.passes.attention import PACKED_ATTENTION
from specpool.engine.run.engine import Engine
from specpool.engine.startup.loading import start_engine

BATCHES = (1, 8)
NUM_DRAFT_TOKENS = 4
CHUNK = 64
MAX_MODEL_LEN = 1024

Steps = Iterator[torch.Tensor]
"""Runs prompts, then steps. Yields logits [sequences, vocabulary]."""
Row = dict[str, Any]


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--shape", choices=sorted(HYBRID_SHAPES), default="qwen3.5-0.8b")
    parser.add_argument("--layers", type=whole(4, 1024), help="default: all layers of the shape")
    parser.add_argument("--cached", type=whole(1, 256), default=64, help="tokens of each prompt")
    parser.add_argument("--threads", type=whole(1, 1024), default=torch.get_num_threads())
    parser.add_argument("--repeats", type=whole(1, 20), default=5)
    parser.add_argument("--steps", type=whole(1, 5), default=3, help="steps per repeat; the fastest counts")
    parser.add_argument("--output", type=output_folder, help="folder for the result")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    layers = options.layers or HYBRID_SHAPES[options.shape]["num_hidden_layers"]
    peer = rounded(random_model(options.shape, "cpu", torch.float32, "sdpa", num_hidden_layers=layers))
    engine = load(peer, options, layers)
    rows = [measure(engine, peer, batch, options) for batch in progress(BATCHES, "sequences")]
    show(f"{options.shape}, {layers} layers, {options.cached} tokens cached, {options.threads} threads", rows)
    result = {
        "shape": options.shape, "layers": layers, "threads": options.threads, "cached": options.cached,
        "bitwise": engine.bitwise, "notes": engine.notes, "steps": rows, "state_mib": state_mib(engine),
    }  # fmt: skip
    finish("hybrid", result, options.output)


@torch.no_grad()
def rounded(model: PreTrainedModel) -> PreTrainedModel:
    """Round the weights to bfloat16."""
    for parameter in model.parameters():
        parameter.copy_(parameter.bfloat16())
    return model


def load(peer: PreTrainedModel, options: argparse.Namespace, layers: int) -> Engine:
    """Return an engine with the weights of `peer`."""
    model: Any = deepcopy(peer, {id(weight): weight for weight in peer.parameters()})  # shares the weights
    model.set_attn_implementation(PACKED_ATTENTION)
    loaded = replace(random_loaded(options.shape, "meta", torch.float32, num_hidden_layers=layers), model=model)
    settings = EngineOptions(
        model=options.shape, device="cpu", dtype="float32", max_model_len=MAX_MODEL_LEN,
        max_sequences=max(BATCHES), threads=options.threads,
    )  # fmt: skip
    return start_engine(replace(loaded, max_model_len=MAX_MODEL_LEN), settings, exact=True, fingerprint="random")


def measure(engine: Engine, peer: PreTrainedModel, batch: int, options: argparse.Namespace) -> Row:
    """Measure steps of `batch` sequences, and verifications of one sequence."""
    torch.manual_seed(batch)
    prompts = torch.randint(engine.vocab_size, (batch, options.cached))
    ours, theirs = engine_steps(engine, prompts), peer_steps(peer, prompts)
    difference = max((next(ours) - next(theirs)).abs().max().item() for _ in range(2))
    steps = {"plain": ours, "transformers": theirs}
    if batch == 1:
        steps["verify"] = engine_steps(engine, prompts, slot=1, num_drafts=NUM_DRAFT_TOKENS)
        next(steps["verify"])
    runs = [
        {kind: min(seconds_of(partial(next, each)) for _ in range(options.steps)) for kind, each in steps.items()}
        for _ in range(options.repeats)
    ]
    ms = {kind: 1000 * statistics.median(run[kind] for run in runs) for kind in steps}
    verify = ms.get("verify")
    return {
        "sequences": batch,
        "plain_ms": round(ms["plain"], 2),
        "transformers_ms": round(ms["transformers"], 2),
        "speedup": round(ms["transformers"] / ms["plain"], 2),
        "verify_ms": verify and round(verify, 2),
        "verify_over_plain": verify and round(verify / ms["plain"], 2),
        "largest_difference": difference,
    }


def engine_steps(engine: Engine, prompts: torch.Tensor, slot: int = 0, num_drafts: int = 0) -> Steps:
    """Steps in the slots from `slot` on. Each step's draft tokens are all accepted."""
    texts, start, size = prompts.tolist(), prompts.shape[1], num_drafts + 1
    yield engine.forward([Span(slot + row, 0, text, 1) for row, text in enumerate(texts)])
    while True:
        tokens = range(start, start + size)
        yield engine.forward(
            [Span(slot + row, start, tokens, size, num_tentative=num_drafts) for row in range(len(texts))]
        )
        start += size


@torch.inference_mode()
def peer_steps(peer: PreTrainedModel, prompts: torch.Tensor) -> Steps:
    """The same steps in transformers."""
    model: Any = peer
    cache = DynamicCache(config=peer.config)
    token_ids = prompts
    for start in count(prompts.shape[1]):
        yield model(token_ids, past_key_values=cache, use_cache=True, logits_to_keep=1).logits[:, -1]
        token_ids = torch.full((len(prompts), 1), start)


def state_mib(engine: Engine) -> Row:
    """MiB of recurrent state that a sequence keeps, and of one state with the inputs of CHUNK positions."""
    recurrent = engine.layout.arena.recurrent
    assert recurrent is not None
    sizes, itemsize = recurrent.sizes, recurrent.inputs.itemsize
    kept = sizes.sequence_bytes(itemsize, recurrent.rows)
    least = sizes.checkpoint_bytes(itemsize) + sizes.tails_bytes(itemsize, CHUNK) / 2
    return {"kept": round(kept / 2**20, 1), "one_and_chunk": round(least / 2**20, 1), "ratio": round(kept / least, 2)}


if __name__ == "__main__":
    main()
