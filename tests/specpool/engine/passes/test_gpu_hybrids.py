"""Models with recurrent layers on GPU kernels: interpreted, and in captured passes."""

from pathlib import Path
from typing import Any

import pytest
import torch
from delta_nets import save_delta_net, save_recurrent
from interpreted_kernels import imitate_graphs, imitate_kernels, load_by_kernels
from tiny_models import load_engine, random_tokens, transformers_logits
from transformers import AutoModelForCausalLM

from specpool.engine.cache.spans import Span
from specpool.engine.passes.fused import FusedModel
from specpool.engine.passes.gpu import layers
from specpool.engine.passes.gpu.captured import CapturedModel
from specpool.engine.passes.gpu.delta_net import run_segments
from specpool.engine.passes.gpu.model import GpuModel, try_kernels
from specpool.engine.passes.packing import Shape
from specpool.engine.run import pass_selection as forward
from specpool.engine.run.engine import Engine

pytest.importorskip("triton")

# The interpreter is slow.
SMALL = {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"], "linear_num_key_heads": 1,
         "linear_num_value_heads": 2, "linear_value_head_dim": 16}  # fmt: skip
SMALL_CONVS = {"num_hidden_layers": 2, "layer_types": ["conv", "full_attention"]}
MODELS = {
    "qwen3_5_text": SMALL, "qwen3_next": SMALL | {"mlp_only_layers": []}, "lfm2, biased": SMALL_CONVS,
    "lfm2_moe": SMALL_CONVS,
}  # fmt: skip
LENGTH = 14


def assert_rounds_have_the_bits_of(engine: Engine, expected: torch.Tensor, tokens: list[int]) -> None:
    """Run a prompt, then verifications beside another sequence. Some drafts are rejected, and a round repeated."""
    engine.forward([Span(0, 0, tokens[:4], 1), Span(2, 0, tokens[:2], 1)])
    wrong = [tokens[5], *(token + 1 for token in tokens[6:8])]
    rounds = [
        [Span(2, 2, tokens[2:3], 1), Span(0, 4, [tokens[4], *wrong], 4, num_tentative=3)],
        [Span(0, 6, tokens[6:10], 4, num_tentative=3), Span(2, 3, tokens[3:5], 2, num_tentative=1)],
        [Span(0, 6, tokens[6:10], 4, num_tentative=3)],
        [Span(2, 5, tokens[5:6], 1), Span(0, 10, tokens[10:14], 4)],
    ]
    rows = [engine.forward(spans) for spans in rounds]
    assert torch.equal(rows[0][:3], expected[[2, 4, 5]])
    assert torch.equal(rows[1], expected[[6, 7, 8, 9, 3, 4]])
    assert torch.equal(rows[2], expected[6:10])
    assert torch.equal(rows[3], expected[[5, 10, 11, 12, 13]])


@pytest.mark.parametrize(
    "name",
    [
        "qwen3_5_text",
        "lfm2, biased",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("qwen3_next", "lfm2_moe")),
    ],
)
def test_kernels_match_transformers_and_decoding_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    folder = save_recurrent(tmp_path, name, **MODELS[name])
    engine = load_by_kernels(monkeypatch, folder, max_model_len=32)
    assert not engine.supports_branches
    assert engine.draft_loop is None
    tokens = random_tokens(LENGTH)
    expected = engine.forward([Span(1, 0, tokens, LENGTH)])
    torch.testing.assert_close(expected, transformers_logits(folder, tokens), atol=5e-5, rtol=1e-4)
    assert_rounds_have_the_bits_of(engine, expected, tokens)


@pytest.mark.parametrize("name", ["qwen3_5_text", "lfm2, biased"])
def test_kernels_are_tried_before_they_take_over_weights(tmp_path: Path, name: str) -> None:
    folder = save_recurrent(tmp_path, name, **MODELS[name])
    try_kernels(FusedModel(AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")))


def test_layers_without_kernels_run_on_torch_operations(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forward, "runs_kernels", lambda device: True)
    folder, tokens = save_recurrent(tmp_path, "kimi_linear"), random_tokens(LENGTH)
    engine = load_engine(folder, native=False, max_sequences=3, max_model_len=32)
    assert isinstance(engine.forward_pass, FusedModel)
    assert engine.bitwise
    assert ["no kernels for" in note for note in engine.notes] == [True]
    expected = engine.forward([Span(1, 0, tokens, LENGTH)])
    assert_rounds_have_the_bits_of(engine, expected, tokens)


def test_passes_have_only_the_segments_that_memory_is_reserved_for(tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(save_delta_net(tmp_path, **SMALL), attn_implementation="eager")
    assert GpuModel(FusedModel(model), 32, max_sequences=3).padded_shape(Shape(9, 3, 3, 3)) == Shape(16, 8, 8, 3)


def test_replayed_passes_have_the_bits_of_eager_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = imitate_graphs(monkeypatch, rows=8)
    engine = load_engine(
        save_delta_net(tmp_path, **SMALL), exact=False, native=False, max_sequences=3, max_model_len=32
    )
    assert isinstance(engine.forward_pass, CapturedModel)
    recurrent, tokens = engine.layout.arena.recurrent, random_tokens(LENGTH)
    assert recurrent is not None
    assert not any(tensor.any() for tensor in (recurrent.states, recurrent.edges, recurrent.inputs, recurrent.gates))
    with engine.forward_pass.eager():
        expected = engine.forward([Span(1, 0, tokens, LENGTH)])
    replayed = fake.replayed
    assert_rounds_have_the_bits_of(engine, expected, tokens)
    assert fake.replayed == replayed + 5


@pytest.mark.slow
@pytest.mark.parametrize("is_exact", [True, False])
def test_the_self_test_covers_the_recurrence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_exact: bool) -> None:
    """The planted bug rounds differently in passes of several sequences."""

    def run(partials: torch.Tensor, *others: Any) -> torch.Tensor:
        is_batch = int((others[2][:, 1] > 0).sum()) > 1
        return run_segments(partials, *others) * (1 + 1e-6 * (is_batch and not is_exact))

    imitate_kernels(monkeypatch)
    monkeypatch.setattr(layers, "run_segments", run)
    folder = save_delta_net(tmp_path, **SMALL)
    engine = load_engine(folder, native=False, cuda_graphs=False, max_sequences=3, max_model_len=64)
    assert isinstance(engine.forward_pass, GpuModel)
    assert engine.bitwise is is_exact
