"""Every forward pass returns the hidden states of transformers, with the same bits in every batch."""

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from interpreted_kernels import FakeGraphs, imitate_graphs, load_by_kernels
from test_fused import VARIANTS, save_random
from tiny_models import load_engine, random_tokens, save_model, small_config
from transformers import AutoModelForCausalLM

from specpool.engine.cache.spans import Span
from specpool.engine.passes.attention import LibraryModel
from specpool.engine.passes.forward_pass import ForwardPass
from specpool.engine.passes.fused import FusedModel
from specpool.engine.passes.gpu import states as gpu_states
from specpool.engine.passes.native.model import NativeModel
from specpool.engine.run.engine import Engine

LAYERS = (1, 2)
TOKENS = random_tokens(20)

PASSES: dict[str, tuple[type[ForwardPass], dict[str, Any]]] = {
    "library": (LibraryModel, {"fused": False}),
    "fused": (FusedModel, {"native": False}),
    "native": (NativeModel, {}),
}


def transformers_states(folder: Path, token_ids: list[int], layers: tuple[int, ...] = LAYERS) -> torch.Tensor:
    """The states [T, layers * hidden] of transformers. Its last `hidden_states` are normalized, so take them before."""
    model: Any = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32).eval()
    final: list[torch.Tensor] = []
    norm = model.model.norm if hasattr(model, "model") else model.transformer.ln_f
    norm.register_forward_pre_hook(lambda _, inputs: final.append(inputs[0]))
    with torch.inference_mode():
        output = model(torch.tensor([token_ids]), use_cache=False, output_hidden_states=True)
    states = [*output.hidden_states[:-1], *final]
    return torch.cat([states[layer][0] for layer in layers], -1).bfloat16()


def assert_close(states: torch.Tensor, expected: torch.Tensor) -> None:
    """Equal except for neighbouring bfloat16 numbers."""
    torch.testing.assert_close(states, expected, atol=2e-5, rtol=2**-7)


def states_of(engine: Engine, *spans: Span, layers: tuple[int, ...] = LAYERS) -> torch.Tensor:
    """The states of spans. Asking for states changes no bit of the logits."""
    logits, states = engine.forward_with_states(spans, layers)
    assert torch.equal(logits, engine.forward(spans))
    return states


def check(engine: Engine, folder: Path) -> None:
    """States match transformers, and have the same bits alone, in a batch, and in chunks."""
    expected = transformers_states(folder, TOKENS)
    alone = states_of(engine, Span(1, 0, TOKENS, 1, num_states=len(TOKENS)))
    assert_close(alone, expected)
    other = Span(0, 0, random_tokens(7, seed=1), 2, num_states=3)
    together = states_of(engine, other, Span(2, 0, TOKENS[:-3], 0, num_states=4))
    assert torch.equal(together[3:], alone[-7:-3])
    assert torch.equal(states_of(engine, Span(2, len(TOKENS) - 3, TOKENS[-3:], 3, num_states=2), other)[:2], alone[-2:])
    assert torch.equal(
        states_of(engine, Span(1, 0, TOKENS, 1, num_states=1), layers=(2,)), alone[-1:, alone.shape[1] // 2 :]
    )
    limit, engine.max_num_batched_tokens = engine.max_num_batched_tokens, 8
    assert torch.equal(
        states_of(engine, Span(1, 0, TOKENS, 1, num_states=15), other), torch.cat([alone[-15:], together[:3]])
    )
    engine.max_num_batched_tokens = limit
    assert states_of(engine, Span(1, 0, TOKENS, 1)).shape == (0, alone.shape[1])


@pytest.mark.parametrize("name", PASSES)
@pytest.mark.parametrize("variant", ["qwen3", pytest.param("glm4, biased", marks=pytest.mark.slow)])
def test_states_match_transformers_in_every_batch(tmp_path: Path, name: str, variant: str) -> None:
    kind, options = PASSES[name]
    folder = save_random(tmp_path, *VARIANTS[variant])
    engine = load_engine(folder, **options)
    assert isinstance(engine.forward_pass, kind)
    check(engine, folder)


def test_modules_of_any_architecture_return_states(tmp_path: Path) -> None:
    folder = save_model(tmp_path, small_config("gpt2"))
    engine = load_engine(folder)
    assert engine.has_states
    states = states_of(engine, Span(0, 0, TOKENS, 1, num_states=len(TOKENS)))
    assert_close(states, transformers_states(folder, TOKENS))


@pytest.mark.slow
def test_ranks_return_the_states_of_one_device(tmp_path: Path) -> None:
    folder = save_random(tmp_path, *VARIANTS["qwen3"])
    expected = states_of(load_engine(folder, device="cpu"), Span(0, 0, TOKENS, 1, num_states=9))
    engine = load_engine(folder, device="cpu", tensor_parallel=2)
    try:
        assert torch.equal(states_of(engine, Span(0, 0, TOKENS, 1, num_states=9)), expected)
    finally:
        engine.close()


@pytest.mark.slow
def test_kernels_return_states(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    folder = save_random(tmp_path, *VARIANTS["glm4, biased"])
    engine = load_by_kernels(monkeypatch, folder, max_model_len=26)
    states = states_of(engine, Span(0, 0, TOKENS[:5], 1, num_states=4))
    assert_close(states, transformers_states(folder, TOKENS[:5])[1:])


# --- CUDA graphs


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> FakeGraphs:
    """Engines replay passes of up to 32 rows."""
    pytest.importorskip("triton")
    return imitate_graphs(monkeypatch, rows=32)


def load_captured(folder: Path) -> Engine:
    return load_engine(save_random(folder, *VARIANTS["qwen3"]), native=False, max_sequences=3, max_model_len=64)


def test_the_same_graphs_record_any_layers(graphs: FakeGraphs, tmp_path: Path) -> None:
    engine = load_captured(tmp_path)
    count, replayed = graphs.captured, graphs.replayed
    check(engine, tmp_path)
    for layers in ((2, 1), (1,), (2,)):
        states = states_of(engine, Span(1, 0, TOKENS, 1, num_states=len(TOKENS)), layers=layers)
        assert_close(states, transformers_states(tmp_path, TOKENS, layers))
    assert graphs.captured == count, "nothing is captured while serving"
    assert graphs.replayed >= replayed + 2 * 3


@pytest.mark.usefixtures("graphs")
def test_layers_are_uploaded_when_they_change(tmp_path: Path) -> None:
    engine, span = load_captured(tmp_path), Span(1, 0, TOKENS, 1, num_states=1)
    engine.forward_with_states([span], (1,))
    with mock.patch.object(gpu_states, "slots_of", wraps=gpu_states.slots_of) as upload:
        for layers in ((1,), (1,), LAYERS, LAYERS, (1,)):
            engine.forward([span])
            engine.forward_with_states([span], layers)
    assert upload.call_count == 2


def test_passes_with_too_many_layers_run_eagerly(
    graphs: FakeGraphs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_states, "MAX_STATE_LAYERS", 1)
    engine = load_captured(tmp_path)
    replayed = graphs.replayed
    engine.forward_with_states([Span(1, 0, TOKENS, 1, num_states=1)], LAYERS)
    assert graphs.replayed == replayed
    check(engine, tmp_path)
