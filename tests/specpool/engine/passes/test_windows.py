"""Sliding windows, attention sinks, soft caps and latent attention, beyond the window of every layer."""

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
)

from specpool.engine.passes.attention import LibraryModel

WINDOW: dict[str, Any] = {"sliding_window": 24, "num_hidden_layers": 4}
LATENT: dict[str, Any] = {
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank"), 32),
    **dict.fromkeys(("qk_nope_head_dim", "qk_rope_head_dim"), 16),
    "v_head_dim": 24,
    "num_key_value_heads": 4,
    "first_k_dense_replace": 2,
}
MIXED = ["sliding_attention", "full_attention"] * 2
SLOW = pytest.mark.slow
FAMILIES = [
    ("mistral", WINDOW),
    pytest.param("qwen2", {**WINDOW, "use_sliding_window": True, "max_window_layers": 2}, marks=SLOW),
    pytest.param("ministral", {**WINDOW, "layer_types": MIXED}, marks=SLOW),
    ("gemma2", {**WINDOW, "attn_logit_softcapping": 5.0, "final_logit_softcapping": 3.0}),
    pytest.param("gemma3_text", {**WINDOW, "layer_types": MIXED}, marks=SLOW),  # two rotary bases
    pytest.param("cohere2", WINDOW, marks=SLOW),
    pytest.param("exaone4", WINDOW, marks=SLOW),
    pytest.param("olmo3", WINDOW, marks=SLOW),
    pytest.param("smollm3", {}, marks=SLOW),
    pytest.param("seed_oss", {}, marks=SLOW),
    ("deepseek_v2", LATENT),  # values are smaller than keys
    pytest.param("deepseek_v3", LATENT, marks=SLOW),
    pytest.param("glm4_moe_lite", {**LATENT, "mlp_layer_types": ["dense"] * 2, "v_head_dim": 32}, marks=SLOW),
]


def check_logits(folder: Path, count: int = 150) -> None:
    """The engine is bitwise, and near transformers on the same weights."""
    engine = load_engine(folder)
    assert isinstance(engine.forward_pass, LibraryModel)
    assert engine.bitwise
    tokens = random_tokens(count)
    expected = transformers_logits(folder, tokens)
    largest = float(expected.abs().max())
    torch.testing.assert_close(decode_alone(engine, tokens), expected, atol=1e-4 * largest, rtol=1e-4)
    assert rows_that_differ(engine) == 0


@pytest.mark.parametrize(("family", "changes"), FAMILIES)
def test_a_family_is_exact_beyond_its_window(tmp_path: Path, family: str, changes: dict[str, Any]) -> None:
    check_logits(save_model(tmp_path, small_config(family, **changes)))
