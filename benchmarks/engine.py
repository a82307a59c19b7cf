"""Measure engine steps by shape, beside transformers and the memory bandwidth limit.

    python -m benchmarks.engine [--model FOLDER] [--threads N] [--repeats 5] [--output FOLDER]
    python -m benchmarks.engine --shape qwen3-8b --device cuda --dtype bfloat16     (random weights of that shape)

A step is one forward pass over random caches. A plain step has one token per sequence, a verify step k + 1.
`transformers` runs the plain step on its own cache. The limit is the time to read the weights and the KV cache once.
Summing a large tensor measures the bandwidth. Runs are interleaved; the tables show medians.
`--weights auto float32` compares plain steps with both kinds of weights. `--activations float32` does not round
activations for quantized weights. The last line printed is JSON.
"""

import argparse
import statistics
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import DynamicCache

from benchmarks.report import finish, output_folder, parser_of, progress, seconds_of, show, whole
from benchmarks.shapes import SHAPES, random_loaded, random_model
from specpool.engine.cache.memory import zeros
from specpool.engine.cache.spans import Span
from specpool.engine.config.devices import use_device
from specpool.engine.config.options import EngineOptions
from specpool.engine.config.sources import UnsupportedModelError
from specpool.engine.models.config import load_config
from specpool.engine.models.embedded_pair import embedded_pair
from specpool.engine.models.weights import read_weights
from specpool.engine.passes.native.model import NativeModel
from specpool.engine.run.engine import Engine
from specpool.engine.startup.loading import load_engine, start_engine

BATCHES, LENGTHS = (1, 2, 4, 8, 16, 32, 64), (128, 512, 1024, 2048)
NUM_DRAFT_TOKENS = 4
MAX_VERIFIED_ROWS = 64
MAX_PEER_POSITIONS = 8192
"""Skip transformers beyond this size, which takes too much memory and time."""
PROFILED = ((1, 512), (8, 512))
"""Sequences and cached length of the profiled steps."""
PROFILED_STEPS = 5
READ_BYTES = 2**29

Step = Callable[[], object]
Row = dict[str, Any]


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--model", help="folder; by default the embedded target")
    parser.add_argument("--shape", choices=sorted(SHAPES), help="a random model of this shape instead")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default="float32")
    parser.add_argument("--weights", choices=("auto", "float32"), nargs="+", default=["auto"], help="how to store them")
    parser.add_argument("--activations", choices=("auto", "float32"), default="auto", help="format of activations")
    parser.add_argument("--no-peer", action="store_true", help="skip transformers, which loads its own weights")
    parser.add_argument("--threads", type=whole(1, 1024), default=torch.get_num_threads())
    parser.add_argument("--lengths", type=whole(1, 2**20), nargs="+", default=LENGTHS)
    parser.add_argument("--repeats", type=whole(1, 1000), default=5)
    parser.add_argument("--steps", type=whole(1, 1000), default=3, help="steps per repeat; the fastest counts")
    parser.add_argument("--output", type=output_folder, help="folder for the result")
    options = parser.parse_args()
    try:
        options.device = str(use_device(options.device))
    except UnsupportedModelError as error:
        parser.error(f"--device: {error}")
    torch.set_num_threads(options.threads)
    model = options.shape or options.model or str(embedded_pair().target)
    try:
        engines = {weights: load(model, options, weights) for weights in options.weights}
    except UnsupportedModelError as error:
        parser.error(f"{model} cannot be measured: {error}")
    report(model, engines, options)


def report(model: str, engines: dict[str, Engine], options: argparse.Namespace) -> None:
    engine = engines[options.weights[0]]
    bandwidth = measure_bandwidth(options.device, options.repeats)
    peer = None if options.no_peer else Peer(model, options)
    rows = measure(engines, peer, options, bandwidth)
    stored = [{"weights": weights, **weight_sizes(each)} for weights, each in engines.items()]
    show("weights in MiB, and by kind", stored)
    for length in options.lengths:
        show(f"{length} tokens cached, {options.threads} threads", [row for row in rows if row["cached"] == length])
    parts: list[Row] = []
    if isinstance(native := engine.forward_pass, NativeModel):
        parts += (
            {"sequences": batch, "cached": length, **shares_of_a_step(native, engine_step(engine, batch, length, 1))}
            for batch, length in PROFILED
            if length in options.lengths
        )
    show("share of a plain step in %", parts)
    result = {
        "model": "/".join(Path(model).parts[-2:]), "dtype": engine.info().dtype, "device": engine.info().device,
        "threads": options.threads, "bandwidth_gb_s": round(bandwidth / 1e9, 1), "bitwise": engine.bitwise,
        "notes": engine.notes, "weights": stored, "steps": rows, "parts": parts,
    }  # fmt: skip
    finish("engine", result, options.output)


def load(model: str, options: argparse.Namespace, weights: str) -> Engine:
    """An engine with random caches and room for the largest step."""
    max_model_len = max(options.lengths) + NUM_DRAFT_TOKENS + 1
    settings = EngineOptions(
        model=model, device=options.device, dtype=options.dtype, weights=weights,
        activations=options.activations, max_model_len=max_model_len, max_sequences=max(BATCHES),
        threads=options.threads,
    )  # fmt: skip
    if options.shape is None:
        engine = load_engine(settings, exact=True)
    else:
        loaded = random_loaded(options.shape, options.device, getattr(torch, options.dtype))
        engine = start_engine(replace(loaded, max_model_len=max_model_len), settings, exact=True)
    for tensor in (*engine.layout.arena.keys, *engine.layout.arena.values):
        tensor.normal_()
    return engine


class Peer:
    def __init__(self, model: str, options: argparse.Namespace) -> None:
        self._device, self._dtype = options.device, getattr(torch, options.dtype)
        if options.shape is not None:
            self._model: Any = random_model(options.shape, options.device, self._dtype, "sdpa")
        else:
            config = load_config(EngineOptions(model=model))
            self._model, _ = read_weights(model, config, torch.device(self._device), self._dtype)

    def step(self, batch: int, cached: int) -> Step:
        """A step of `batch` sequences; each call adds a token to the cache."""
        config = self._model.config
        kv_heads = config.num_key_value_heads
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        cache = DynamicCache(config=config)
        for layer in range(config.num_hidden_layers):
            keys, values = torch.randn(2, batch, kv_heads, cached, head_dim, device=self._device, dtype=self._dtype)
            cache.update(keys, values, layer)
        token_ids = torch.full((batch, 1), 5, device=self._device)
        return torch.inference_mode()(lambda: self._model(token_ids, past_key_values=cache, use_cache=True))


def measure(engines: dict[str, Engine], peer: Peer | None, options: argparse.Namespace, bandwidth: float) -> list[Row]:
    (_, engine), *others = engines.items()
    rows = []
    for cached, batch in progress([(length, batch) for length in options.lengths for batch in BATCHES], "shapes"):
        kinds: dict[str, Step] = {"plain": engine_step(engine, batch, cached, 1)}
        if batch * (NUM_DRAFT_TOKENS + 1) <= MAX_VERIFIED_ROWS:
            kinds["verify"] = engine_step(engine, batch, cached, NUM_DRAFT_TOKENS + 1)
        if peer is not None and batch * cached <= MAX_PEER_POSITIONS:
            kinds["transformers"] = peer.step(batch, cached)
        kinds |= {weights: engine_step(other, batch, cached, 1) for weights, other in others}
        for step in kinds.values():
            step()
        runs = [{kind: fastest(step, options.steps) for kind, step in kinds.items()} for _ in range(options.repeats)]
        ms = {kind: 1000 * statistics.median(run[kind] for run in runs) for kind in kinds}
        rows.append(summary(engine, batch, cached, ms, bandwidth))
    return rows


def engine_step(engine: Engine, batch: int, cached: int, tokens: int) -> Step:
    """A step of the engine: `tokens` new tokens in each of the first `batch` slots."""
    # Distinct tokens choose different experts.
    spans = [
        Span(slot, cached, [at % engine.vocab_size for at in range(slot * tokens, slot * tokens + tokens)], tokens)
        for slot in range(batch)
    ]
    return lambda: engine.forward(spans)


def fastest(step: Step, times: int) -> float:
    return min(seconds_of(lambda: finished(step)) for _ in range(times))


def finished(step: Step) -> None:
    step()
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def summary(engine: Engine, batch: int, cached: int, ms: dict[str, float], bandwidth: float) -> Row:
    plain, verify, peer = ms.pop("plain"), ms.pop("verify", None), ms.pop("transformers", None)
    limit = (weight_bytes_read(engine) + batch * cached * engine.info().kv_bytes_per_token) / bandwidth * 1000
    return {
        "cached": cached,
        "sequences": batch,
        "plain_ms": round(plain, 3),
        "limit_ms": round(limit, 3),
        "of_limit": round(limit / plain, 2),
        "verify_ms": verify and round(verify, 3),
        "verify_over_plain": verify and round(verify / plain, 2),
        "transformers_ms": peer and round(peer, 3),
        "speedup": peer and round(peer / plain, 2),
        **{f"{kind}_ms": round(other, 3) for kind, other in ms.items()},
        **{f"{kind}_over_plain": round(other / plain, 2) for kind, other in ms.items()},
    }


def weight_bytes_read(engine: Engine) -> float:
    """Bytes of weights that a step reads: everything except an untied embedding table.

    Assumes that the embedding has the model's average number of bytes per weight.
    """
    config, info = engine.loaded.config, engine.info()
    tied = config.tie_word_embeddings and engine.loaded.output_ids is None
    embedding = 0 if tied else info.vocab_size * config.hidden_size
    return info.weight_bytes * (1 - embedding / info.parameters)


def weight_sizes(engine: Engine) -> Row:
    """MiB of all weights and of GEMM weights by kind, and the format of activations."""
    info = engine.info()
    kinds = ", ".join(f"{kind} {count / 2**20:.1f}" for kind, count in info.weight_kinds.items())
    return {"whole": round(info.weight_bytes / 2**20, 1), "kinds": kinds, "activations": info.activations}


def measure_bandwidth(device: str, repeats: int) -> float:
    """Read bandwidth of the device in bytes per second, from a tensor larger than any cache."""
    tensor = zeros((READ_BYTES // 4,), torch.float32, torch.device(device)).fill_(1.0)
    return READ_BYTES / min(fastest(tensor.sum, 3) for _ in range(repeats))


def shares_of_a_step(native: NativeModel, step: Step) -> Row:
    """Share of each kind of operation in a plain step, in percent."""
    with native.measured() as seconds:
        total = seconds_of(lambda: [step() for _ in range(PROFILED_STEPS)])
    shares = {name: round(100 * spent / total, 1) for name, spent in seconds.items()}
    return {**shares, "the rest": round(100 - sum(shares.values()), 1)}


if __name__ == "__main__":
    main()
