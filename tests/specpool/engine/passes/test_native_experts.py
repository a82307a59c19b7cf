"""Mixtures of experts on the compiled pass: batch-invariant, with the logits of transformers."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import (
    decode_alone,
    edited_weights,
    load_engine,
    random_tokens,
    rows_that_differ,
    save_model,
    small_config,
    transformers_logits,
)

from specpool.engine.cache.spans import Span
from specpool.engine.passes.native.model import NativeModel
from specpool.engine.run.engine import Engine

EXPERTS: dict[str, Any] = {"num_experts_per_tok": 3, "moe_intermediate_size": 48, "num_hidden_layers": 3}
FAMILIES: dict[str, dict[str, Any]] = {
    "glm4_moe": {  # shared experts, groups, a correction, and a first layer that is dense
        **EXPERTS, "n_routed_experts": 8, "n_group": 4, "topk_group": 2, "n_shared_experts": 1,
        "first_k_dense_replace": 1, "intermediate_size": 80, "routed_scaling_factor": 1.5,
    },
    "qwen3_moe": {**EXPERTS, "num_experts": 40, "norm_topk_prob": False},
    "mixtral": {"num_local_experts": 8, "intermediate_size": 48},
}  # fmt: skip
each_family = pytest.mark.parametrize("family", FAMILIES)


def save_mixture(folder: Path, family: str) -> Path:
    """Save a random model whose router clearly prefers some experts."""
    save_model(folder, small_config(family, **FAMILIES[family]))
    generator = torch.Generator().manual_seed(1)
    with edited_weights(folder) as weights:
        for name, weight in weights.items():
            if weight.dim() < 2:  # norms, biases and corrections
                weight.add_(torch.randn(weight.shape, generator=generator), alpha=0.1)
            elif name.endswith(("gate.weight", "router.weight")):
                weight.copy_(torch.randn(weight.shape, generator=generator) / 2)
    return folder


def load_mixture(folder: Path, family: str, **options: object) -> Engine:
    engine = load_engine(save_mixture(folder, family), **options)
    assert isinstance(engine.forward_pass, NativeModel)
    return engine


@each_family
def test_a_mixture_is_bitwise_and_has_the_logits_of_transformers(tmp_path: Path, family: str) -> None:
    engine, tokens = load_mixture(tmp_path, family), random_tokens(60)
    alone, expected = decode_alone(engine, tokens), transformers_logits(tmp_path, tokens)
    torch.testing.assert_close(alone, expected, atol=1e-4, rtol=1e-4)
    assert engine.bitwise
    assert rows_that_differ(engine) == 0
    assert torch.equal(engine.forward([Span(1, 0, tokens, 60)]), alone)
