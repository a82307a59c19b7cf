"""Every decoder family of transformers is served with correct logits, or refused from its configuration alone."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import SMALL, decode_alone, load_engine, random_tokens, save_model, transformers_logits, vary
from transformers import AutoConfig, PreTrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from specpool.engine.config.architectures import DELTA_NETS
from specpool.engine.config.options import EngineOptions
from specpool.engine.config.sources import UnsupportedModelError
from specpool.engine.models.config import load_config

WINDOW, LENGTH = 32, 80
FEW_EXPERTS = {
    **dict.fromkeys(("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts"), 2),
    **dict.fromkeys(("num_experts_per_tok", "moe_k", "n_group", "topk_group", "n_shared_experts"), 1),
    "moe_intermediate_size": 32,
}
SIZES = {**SMALL, **FEW_EXPERTS, "sliding_window": WINDOW}
ROPE = {"rope_type": "default", "rope_theta": 10_000.0}
MIXED = ["sliding_attention", "full_attention"]
HYBRID = {"layer_types": ["linear_attention", "full_attention"], "linear_key_head_dim": 16}
LATENT = {"head_dim": 64, "num_key_value_heads": 4}
CHANGES: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("axk1", "deepseek_v2", "deepseek_v3", "glm4_moe_lite", "youtu"), LATENT),
    **dict.fromkeys(DELTA_NETS, HYBRID),
    "codegen": {"rotary_dim": 8},
    "cohere_compass_text": {"layer_types": MIXED, "rope_parameters": dict.fromkeys(MIXED, ROPE)},
    "dots3_note_text": {"num_key_value_heads": 4},
    "gemma3n_text": {"num_kv_shared_layers": 0, "layer_types": MIXED, "vocab_size_per_layer_input": 258},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "gptj": {"rotary_dim": 8},
    "kimi_linear": {"layer_types": ["linear_attention", "full_attention"], "num_key_value_heads": 4},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "mamba2": {"num_heads": 8, "head_dim": 16},
    "modernbert-decoder": {"pad_token_id": 0},
    "xlnet": {"d_head": 16},
}
"""Changes that make a small configuration valid, or similar to published ones."""
UNBUILT = {"dbrx", "gemma4_assistant", "qwen3_5", "qwen3_5_moe"}
"""Families whose class rejects its own defaults, or loads a different model from a saved configuration.

The sizes of wrappers such as `qwen3_5` are those of their text part; `test_vision_language.py` covers them.
"""
OPTIONAL = ("pad_token_id", "bos_token_id", "head_dim", "num_hidden_layers")
SERVED = """
afmoe apertus arcee aria_text beam biogpt bitnet cohere cohere2 cohere2_moe cohere_compass_text ctrl cwm
deepseek_v2 deepseek_v3 dots1 gemma2 glm4_moe_lite gpt_oss granite_swa
ernie4_5 ernie4_5_moe exaone4 exaone_moe flex_olmo gemma gemma3_text gemma3n_text glm glm4 glm4_moe gpt-sw3
gpt2 gpt_bigcode gpt_neox granite granitemoe granitemoeshared helium hunyuan_v1_dense hunyuan_v1_moe hy_v3
hyperclovax internlm3 iquestcoder jais2 kimi_linear kolibri1 laguna lfm2 lfm2_moe llama mellum minimax_m2
minimax_m3_vl_text ministral ministral3 mistral mixtral modernbert-decoder nanochat olmo olmo2 olmo3 olmoe opt
persimmon phi phi3 qwen2 qwen2_moe qwen3 qwen3_5_moe_text qwen3_5_text qwen3_moe qwen3_next seed_oss smollm3
solar_open starcoder2
"""
"""Families that must not be refused."""
VARIANTS = [
    ("falcon", {"alibi": True}, "position biases (ALiBi)"),
    ("phimoe", {"sliding_window": None}, None),
    ("gemma3n_text", {"num_hidden_layers": 4, "num_kv_shared_layers": 2, "layer_types": MIXED * 2}, None),
    ("granitemoehybrid", {"layer_types": ["attention", "attention"]}, None),
    ("lfm2", {"layer_types": ["full_attention", "full_attention"]}, None),
    ("mistral", {"vision_config": {"hidden_size": 8}}, "multimodal (vision_config)"),
]
"""Families in which only some models have an unsupported feature."""


def tiny_config(family: str, **changes: Any) -> PreTrainedConfig:
    """Return a configuration of this family, as small as its class allows."""
    known = AutoConfig.for_model(family)
    names = known.to_dict().keys() | known.attribute_map.keys()
    for left_out in [(), *((name,) for name in OPTIONAL), OPTIONAL[:2], OPTIONAL[:3], OPTIONAL]:
        sizes = {name: size for name, size in SIZES.items() if name in names and name not in left_out}
        try:
            return AutoConfig.for_model(family, **{**sizes, **CHANGES.get(family, {}), **changes})
        except Exception as error:  # the class refuses some of the values
            problem = error
    raise problem


def refused_by_config(folder: Path, config: PreTrainedConfig, architecture: str) -> str | None:
    """Return why a folder with only this configuration is refused; None if it is not."""
    config.architectures = [architecture]
    config.save_pretrained(folder)
    try:
        load_config(EngineOptions(model=str(folder), max_model_len=LENGTH))
    except UnsupportedModelError as error:
        return str(error)
    return None


def check_logits(folder: Path, config: PreTrainedConfig) -> None:
    """Compare the engine's logits of a random model, beyond its window, with those of transformers."""
    vary(save_model(folder, config), 0.1)
    engine = load_engine(folder, exact=False, max_model_len=LENGTH, max_sequences=1)
    tokens = random_tokens(LENGTH)
    actual, expected = decode_alone(engine, tokens), transformers_logits(folder, tokens)
    torch.testing.assert_close(actual, expected, atol=1e-4 * float(expected.abs().max()), rtol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("family", sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.keys() - UNBUILT))
def test_a_family_is_served_or_refused_from_its_configuration(tmp_path: Path, family: str) -> None:
    config = tiny_config(family)
    message = refused_by_config(tmp_path / "config", config, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[family])
    if message is None:
        check_logits(tmp_path / "model", config)
        return
    assert family not in SERVED.split(), message
    assert message.endswith("docs/models.md lists the supported models")
    assert config.model_type in message


@pytest.mark.slow
@pytest.mark.parametrize(("family", "changes", "feature"), VARIANTS)
def test_features_are_recognized_by_their_values(
    tmp_path: Path, family: str, changes: dict[str, Any], feature: str | None
) -> None:
    config = tiny_config(family, **changes)
    message = refused_by_config(tmp_path / "config", config, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[family])
    if feature is None:
        assert message is None
        check_logits(tmp_path / "model", config)
    else:
        assert message is not None
        assert feature in message
