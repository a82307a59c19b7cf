"""Sliding windows, attention sinks, soft caps and latent attention match transformers beyond every window."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import (
    decode_alone,
    load_engine,
    random_tokens,
    rows_that_differ,
    save_model,
    small_config,
    transformers_logits,
    vary,
)
from transformers import PreTrainedConfig

from specpool.engine.cache.spans import Span
from specpool.engine.passes import explicit_attention
from specpool.engine.passes.attention import LibraryModel
from specpool.engine.passes.explicit_attention import attend_explicitly
from specpool.engine.run.engine import Engine

WINDOW: dict[str, Any] = {"sliding_window": 24, "num_hidden_layers": 4}
LATENT: dict[str, Any] = {
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank"), 32),
    **dict.fromkeys(("qk_nope_head_dim", "qk_rope_head_dim"), 16),
    "v_head_dim": 24,
    "num_key_value_heads": 4,
    "first_k_dense_replace": 2,
}
MIXED = ["sliding_attention", "full_attention"] * 2
EXPERTS: dict[str, Any] = {"num_experts_per_tok": 2, "moe_intermediate_size": 32, "first_k_dense_replace": 1}
SLOW = pytest.mark.slow
FAMILIES = [
    pytest.param("mistral", WINDOW, marks=SLOW),
    pytest.param("qwen2", {**WINDOW, "use_sliding_window": True, "max_window_layers": 2}, marks=SLOW),
    pytest.param("ministral", {**WINDOW, "layer_types": MIXED}, marks=SLOW),
    ("gemma2", {**WINDOW, "attn_logit_softcapping": 5.0, "final_logit_softcapping": 3.0}),
    pytest.param("gemma3_text", {**WINDOW, "layer_types": MIXED}, marks=SLOW),  # two rotary bases
    pytest.param("cohere2", WINDOW, marks=SLOW),
    pytest.param("exaone4", WINDOW, marks=SLOW),
    pytest.param("olmo3", WINDOW, marks=SLOW),
    pytest.param("smollm3", {}, marks=SLOW),
    pytest.param("seed_oss", {}, marks=SLOW),
    pytest.param("granite_swa", WINDOW, marks=SLOW),  # attention sinks
    pytest.param("deepseek_v2", LATENT, marks=SLOW),  # values are smaller than keys
    pytest.param("deepseek_v3", LATENT, marks=SLOW),
    pytest.param("gpt_oss", {**WINDOW, "num_local_experts": 4, "num_experts_per_tok": 2}, marks=SLOW),
    pytest.param("deepseek_v2", {**LATENT, **EXPERTS, "n_routed_experts": 4, "n_group": 1}, marks=SLOW),
    pytest.param(
        "deepseek_v3", {**LATENT, **EXPERTS, "n_routed_experts": 8, "n_group": 2, "topk_group": 1}, marks=SLOW
    ),
    pytest.param("glm4_moe_lite", {**LATENT, "mlp_layer_types": ["dense"] * 2, "v_head_dim": 32}, marks=SLOW),
]


def save_random(folder: Path, config: PreTrainedConfig) -> Path:
    """Save a model whose sinks, norms and biases are random too."""
    return vary(save_model(folder, config))


def check_logits(engine: Engine, folder: Path, count: int = 150) -> None:
    """Compare logits beyond the window with those of transformers for the same weights."""
    tokens = random_tokens(count)
    expected = transformers_logits(folder, tokens)
    largest = float(expected.abs().max())
    for logits in (decode_alone(engine, tokens[:60]), engine.forward([Span(1, 0, tokens, count)])):
        torch.testing.assert_close(logits, expected[: len(logits)], atol=1e-4 * largest, rtol=1e-4)


@pytest.mark.parametrize(("family", "changes"), FAMILIES)
def test_a_family_is_exact_beyond_its_window(tmp_path: Path, family: str, changes: dict[str, Any]) -> None:
    folder = save_random(tmp_path, small_config(family, **changes))
    engine = load_engine(folder, fused=False)
    assert isinstance(engine.forward_pass, LibraryModel)
    assert engine.bitwise
    check_logits(engine, folder)
    assert rows_that_differ(engine) == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "changes", "options"),
    [
        ("gemma2", {"attn_logit_softcapping": 5.0}, {"fused": False}),
        ("gemma2", {"attn_logit_softcapping": 5.0}, {"native": False}),
        ("gemma2", {"attn_logit_softcapping": 5.0}, {}),
        ("gpt_oss", {"num_local_experts": 4, "num_experts_per_tok": 2}, {}),
        ("granite_swa", {}, {}),
    ],
)
def test_a_window_may_hide_many_tiles(
    tmp_path: Path, family: str, changes: dict[str, Any], options: dict[str, Any]
) -> None:
    config = small_config(family, sliding_window=20, max_position_embeddings=2048, **changes)
    engine = load_engine(save_random(tmp_path, config), **options)
    assert engine.bitwise
    check_logits(engine, tmp_path, count=1300)


@pytest.mark.parametrize("window", [1, 15, 16, 17, 33])
def test_a_branch_sees_the_window_of_its_own_positions(tmp_path: Path, window: int) -> None:
    """A branch after a prefix has the logits of a sequence with the same tokens."""
    engine = load_engine(save_random(tmp_path, small_config("mistral", sliding_window=window)))
    assert engine.forward_pass.supports_branches
    tokens, other = random_tokens(60), random_tokens(20, seed=1)
    engine.forward([Span(0, 0, tokens, 0)])
    for prefix in (0, 7, 16, 50):
        expected = engine.forward([Span(1, 0, tokens[:prefix] + other, 20)])
        branch = engine.forward([Span(0, prefix, other, 20, prefix_length=prefix, offset=60 - prefix)])
        assert torch.equal(branch, expected)


def test_rows_have_the_same_bits_in_any_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(5, 2, size, 16, generator=generator) for size in (3, 128, 128))
    visible = torch.rand(5, 1, 3, 128, generator=generator) < 0.5
    sinks = torch.randn(5, 2, 3, generator=generator)
    for softcap in (None, 5.0):
        inputs = (query, key, value, visible, 0.25, sinks, softcap)
        together = attend_explicitly(*inputs)
        scores = query @ key.transpose(2, 3) * 0.25
        scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
        scores = torch.cat([scores.masked_fill(~visible, -torch.inf), sinks[..., None]], -1)
        torch.testing.assert_close(together, scores.softmax(-1)[..., :-1] @ value)
        alone = [
            attend_explicitly(*(each[i : i + 1] for each in inputs[:4]), 0.25, sinks[i : i + 1], softcap)
            for i in range(5)
        ]
        assert torch.equal(torch.cat(alone), together)
        with monkeypatch.context() as patch:
            patch.setattr(explicit_attention, "MAX_ELEMENTS", 0)  # row by row
            assert torch.equal(attend_explicitly(*inputs), together)
