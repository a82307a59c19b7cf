"""Activations and long passes are batch-invariant on any number of threads."""

from pathlib import Path

import pytest
import torch
from tiny_models import decode_alone, load_engine, random_tokens, save_model, small_config
from torch import nn
from torch.nn.functional import silu
from transformers.activations import ACT2FN

from specpool.engine.cache.spans import Span
from specpool.engine.passes.modules import ChunkedActivation, chunk_activations, in_chunks
from specpool.engine.run.engine import Engine

pytestmark = pytest.mark.cpus


@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize("features", [1536, 160, 40_000])
@pytest.mark.parametrize("function", [silu, ChunkedActivation(nn.GELU()), ChunkedActivation(ACT2FN["gelu_new"])])
def test_activations_are_batch_invariant(features: int, function: object, threads: int) -> None:
    torch.set_num_threads(threads)
    x = torch.randn(300 if features < 10_000 else 5, 2 * features)[:, :features]  # half of gate and up
    alone = torch.cat([in_chunks(function, row[None]) for row in x])  # type: ignore[arg-type]
    for count in (2, 7, 22, 96, 271, 300):
        assert torch.equal(in_chunks(function, x[-count:]), alone[-count:])  # type: ignore[arg-type]
    torch.testing.assert_close(alone, function(x))  # type: ignore[operator]


def test_only_activations_are_replaced() -> None:
    model = nn.ModuleDict({"mlp": nn.ModuleDict({"act_fn": ACT2FN["silu"], "up": nn.Linear(4, 4)}), "act": nn.GELU()})
    chunk_activations(model)
    assert isinstance(model["mlp"]["act_fn"], ChunkedActivation)
    assert isinstance(model["act"], ChunkedActivation)
    assert type(model["mlp"]["up"]) is nn.Linear


def long_passes_differ(engine: Engine) -> bool:
    """Whether a pass of three sequences with 271 tokens gives other logits than each alone."""
    sequences = [random_tokens(length, seed=length) for length in (2, 16, 253)]
    alone = [decode_alone(engine, tokens) for tokens in sequences]
    spans = [Span(slot, 0, tokens, len(tokens)) for slot, tokens in enumerate(sequences)]
    together = engine.forward(spans).split([len(tokens) for tokens in sequences])
    return not all(map(torch.equal, together, alone))


@pytest.mark.slow
@pytest.mark.thorough
@pytest.mark.parametrize("threads_of_engine", [2, 8])
@pytest.mark.parametrize(("architecture", "fused"), [("llama", True), ("llama", False), ("gpt2", False)])
def test_long_passes_are_batch_invariant(
    tmp_path: Path, architecture: str, fused: bool, threads_of_engine: int
) -> None:
    sizes = {"n_layer": 2, "n_head": 4} if architecture == "gpt2" else {"intermediate_size": 160}
    folder = save_model(tmp_path, small_config(architecture, **sizes))
    engine = load_engine(folder, threads=threads_of_engine, fused=fused, native=False)
    assert not engine.bitwise or not long_passes_differ(engine)
    assert engine.bitwise or architecture == "gpt2"
