"""Experts of the compiled pass: routing, and equal bits on any processor with any number of threads."""

import ctypes
import math
import platform
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import (
    decode_alone,
    load_engine,
    random_tokens,
    round_weights,
    rows_that_differ,
    save_model,
    small_config,
    vary,
)

from specpool.engine.cache.spans import Span
from specpool.engine.native import compiler
from specpool.engine.passes.native.model import NativeModel
from specpool.engine.passes.native.panels import BFLOAT16, PANEL
from specpool.engine.run.engine import Engine

pytestmark = [pytest.mark.cpus, pytest.mark.thorough]
EXPERTS: dict[str, Any] = {
    "num_hidden_layers": 3, "num_experts_per_tok": 3, "moe_intermediate_size": 48, "n_routed_experts": 12,
    "n_group": 4, "topk_group": 2, "n_shared_experts": 1, "first_k_dense_replace": 1,
}  # fmt: skip


def save_mixture(folder: Path) -> Path:
    """Save a random mixture with shared experts, groups, corrections and a dense layer of another size."""
    return vary(save_model(folder, small_config("glm4_moe", **EXPERTS)), 0.1, "gate.weight")


def load_mixture(folder: Path, **options: object) -> Engine:
    engine = load_engine(folder, **options)
    assert isinstance(engine.forward_pass, NativeModel)
    return engine


def test_of_equal_scores_the_lower_index_comes_first(tmp_path: Path) -> None:
    """All experts have equal scores. transformers may choose others."""
    engine, fused = load_mixture(save_mixture(tmp_path)), load_engine(tmp_path, native=False)
    native: Any = engine.forward_pass
    for layer in native._layers[1:3]:
        ctypes.memset(layer.router.panels[0].weight, 0, 4 * PANEL * layer.router.inputs)
        ctypes.memset(layer.correction, 0, 4 * EXPERTS["n_routed_experts"])
    layers: Any = fused.forward_pass.layers
    for layer in layers[1:]:
        layer.mlp.router.forward = lambda rows: rows.new_zeros(len(rows), EXPERTS["n_routed_experts"])
        layer.mlp.correction.zero_()
        del layer.mlp.downs[EXPERTS["num_experts_per_tok"] :]  # no row chooses them
    tokens = random_tokens(20)
    torch.testing.assert_close(decode_alone(engine, tokens), decode_alone(fused, tokens), atol=1e-5, rtol=1e-4)


def test_the_sum_of_weights_has_an_epsilon(tmp_path: Path) -> None:
    engine, fused = load_mixture(save_mixture(tmp_path)), load_engine(tmp_path, native=False)
    native: Any = engine.forward_pass
    layers: Any = fused.forward_pass.layers
    tokens = random_tokens(20)
    before = decode_alone(engine, tokens)
    native._model.routing.epsilon = 1
    for layer in layers[1:]:
        layer.mlp.routing = layer.mlp.routing._replace(epsilon=1.0)
    assert (decode_alone(engine, tokens) - before).abs().max() > 1e-2
    torch.testing.assert_close(decode_alone(engine, tokens), decode_alone(fused, tokens), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("scores", ["sigmoid", "softmax"])
def test_a_nan_router_logit_makes_the_logits_nan(tmp_path: Path, scores: str) -> None:
    engine = load_mixture(save_mixture(tmp_path))
    native: Any = engine.forward_pass
    native._model.routing.is_sigmoid = scores == "sigmoid"
    last = EXPERTS["n_routed_experts"] - 1
    ctypes.c_float.from_address(native._layers[1].router.panels[0].weight + 4 * last).value = math.nan
    assert decode_alone(engine, random_tokens(1)).isnan().all()


def test_thread_counts_change_no_bit(tmp_path: Path) -> None:
    engine, tokens = load_mixture(save_mixture(tmp_path)), random_tokens(120)
    expected = decode_alone(engine, tokens)
    for threads in (1, 2, 3, 7):
        torch.set_num_threads(threads)
        prompt = engine.forward([Span(1, 0, tokens[:100], 100), Span(2, 0, tokens[:3], 0)])
        rest = engine.forward([Span(2, 3, tokens[3:20], 0), Span(1, 100, tokens[100:], 20)])
        assert torch.equal(torch.cat([prompt, rest]), expected)


@pytest.mark.slow
def test_experts_are_batch_invariant_on_other_processors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if platform.machine() != "x86_64":
        pytest.skip("the flags are for another kind of processor")
    here, tokens = load_mixture(save_mixture(tmp_path)), random_tokens(40)
    monkeypatch.setitem(compiler.NATIVE, "x86_64", "-march=x86-64")
    there = load_mixture(tmp_path)
    torch.testing.assert_close(decode_alone(there, tokens), decode_alone(here, tokens), atol=1e-4, rtol=1e-4)
    assert rows_that_differ(there) == 0


def test_experts_stay_in_bfloat16_and_their_activations_fit_the_estimate(tmp_path: Path) -> None:
    engine = load_mixture(round_weights(save_mixture(tmp_path)), max_num_batched_tokens=64)
    native: Any = engine.forward_pass
    assert native.kinds.keys() == {BFLOAT16}
    engine.forward([Span(1, 0, random_tokens(64), 64)])
    assert native._workspace.nbytes <= engine.info().activation_bytes
