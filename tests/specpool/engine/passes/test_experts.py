"""Mixtures of experts are batch-invariant, and their logits match transformers."""

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
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig
from transformers.models.glm4_moe.modeling_glm4_moe import Glm4MoeMoE
from transformers.models.lfm2_moe.modeling_lfm2_moe import Lfm2MoeSparseMoeBlock

from specpool.engine.numerics.tiles import Tiles
from specpool.engine.passes.experts import Experts, replace_experts, set_expert_tiles
from specpool.engine.passes.fused_experts import FusedExperts, choose_experts
from specpool.engine.passes.fused_short_conv import rename_modules
from specpool.engine.passes.kinds import SILU
from specpool.engine.startup.step_times import timed_passes

MAX_LENGTH = 128
EXPERTS: dict[str, Any] = {
    **dict.fromkeys(("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts"), 8),
    **dict.fromkeys(("num_experts_per_tok", "moe_k", "moe_topk"), 3),
    **dict.fromkeys(("topk_group", "n_shared_experts", "moe_num_shared_experts", "first_k_dense_replace"), 1),
    "n_group": 2,
    "moe_intermediate_size": 48,
    "shared_expert_intermediate_size": 80,
    "sliding_window": MAX_LENGTH,
}
ROUTERS = ("gate.weight", "router.weight", "gate.wg.weight", "router.gate.weight")
FAMILIES = """
afmoe cohere2_moe dots1 ernie4_5_moe exaone_moe flex_olmo granitemoe granitemoeshared hunyuan_v1_moe hy_v3
laguna mellum minimax_m2 minimax_m3_vl_text mixtral olmoe phimoe qwen2_moe qwen3_moe solar_open
"""
FIRST = "glm4_moe"  # shared experts, groups, and a sigmoid in the router


def config_of(family: str) -> PreTrainedConfig:
    known = AutoConfig.for_model(family)
    names = known.to_dict().keys() | known.attribute_map.keys()
    return small_config(family, **{name: value for name, value in EXPERTS.items() if name in names})


@torch.no_grad()
@pytest.mark.parametrize(("family", "block"), [("lfm2_moe", Lfm2MoeSparseMoeBlock), ("glm4_moe", Glm4MoeMoE)])
def test_weights_with_a_tiny_sum_match_transformers(family: str, block: Any) -> None:
    """All scores are about 1e-6. Families add different numbers to their sum."""
    torch.manual_seed(0)
    config = config_of(family)
    module, rows = block(config), torch.ones(1, config.hidden_size)
    for parameter in module.parameters():
        parameter.normal_(std=0.02)
    module.gate.weight -= 14 / config.hidden_size
    is_lfm2 = family == "lfm2_moe"
    _, weights, chosen = module.gate(rows, *([module.expert_bias] if is_lfm2 else []))
    if is_lfm2:
        rename_modules(module)
    experts = FusedExperts(module, SILU, None)
    own, own_weights = choose_experts(experts.router(rows), experts.routing, experts.correction)
    assert torch.equal(own.sort().values, chosen.sort().values)
    torch.testing.assert_close(own_weights[0, own.argsort()], weights[0, chosen.argsort()])


def save_mixture(folder: Path, family: str) -> Path:
    """Save a random model whose router clearly prefers some experts."""
    return vary(save_model(folder, config_of(family)), 0.1, ROUTERS)


@pytest.mark.parametrize("family", [FIRST, *(pytest.param(each, marks=pytest.mark.slow) for each in FAMILIES.split())])
def test_a_mixture_is_bitwise_and_has_the_logits_of_transformers(tmp_path: Path, family: str) -> None:
    engine = load_engine(save_mixture(tmp_path, family), fused=False, max_model_len=MAX_LENGTH)
    assert any(isinstance(module, Experts) for module in engine.forward_pass.modules())
    tokens = random_tokens(60)
    expected = transformers_logits(tmp_path, tokens)
    torch.testing.assert_close(decode_alone(engine, tokens), expected, atol=1e-4, rtol=1e-4)
    assert engine.bitwise
    assert rows_that_differ(engine) == 0
    assert any("modules of transformers" in note for note in engine.notes)


@pytest.mark.parametrize("family", ["mixtral", "gpt_oss"])  # gpt_oss: transposed weights, biases, a gate of its own
def test_experts_replace_those_of_transformers(family: str) -> None:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config_of(family), dtype=torch.float32).eval()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    block = model.model.layers[0].mlp
    hidden = torch.randn(1, 37, model.config.hidden_size)
    with torch.inference_mode():
        expected, memory = _output(block, hidden), block.experts.gate_up_proj.data_ptr()
        replace_experts(block)
        experts = block.experts
        assert (experts.ups[0].weight.data_ptr() == memory) == (family == "mixtral")
        set_expert_tiles(block, Tiles(min_rows=8, row_multiple=8))
        together = _output(block, hidden)
        torch.testing.assert_close(together, expected, atol=1e-4, rtol=1e-4)
        for count in (1, 15, 16, 17):
            torch.testing.assert_close(_output(block, hidden[:, -count:]), together[:, -count:], atol=1e-5, rtol=1e-5)


def _output(block: nn.Module, hidden: torch.Tensor) -> torch.Tensor:
    output = block(hidden)
    return output[0] if isinstance(output, tuple) else output


def test_timed_rows_choose_different_experts(tmp_path: Path) -> None:
    """With equal tokens, rows of a round would seem as cheap as in a dense model."""
    engine = load_engine(save_mixture(tmp_path, "qwen3_moe"), exact=False, fused=False, max_model_len=MAX_LENGTH)
    experts = next(module for module in engine.forward_pass.modules() if isinstance(module, Experts))
    used = set[int]()
    for index, up in enumerate(experts.ups):
        up.register_forward_hook(lambda *_, index=index: used.add(index))
    with timed_passes(engine, [32]) as passes:
        passes[32]()
    assert len(used) > EXPERTS["num_experts_per_tok"]
