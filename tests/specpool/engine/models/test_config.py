"""Unsupported models are refused by their configuration, before any weight is read."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from delta_nets import DELTA_NET_SIZES
from tiny_models import (
    decode_alone,
    edit_json,
    load_engine,
    random_tokens,
    refusal,
    save_model,
    small_config,
    transformers_logits,
)
from tiny_pair import MAX_MODEL_LEN, tiny_config
from transformers import AutoConfig, PreTrainedConfig

from specpool.engine.config.options import EngineOptions
from specpool.engine.models.loading import load_model


def save_config(folder: Path, config: PreTrainedConfig, **changes: Any) -> Path:
    """Save a configuration without weights."""
    config.save_pretrained(folder)
    return edit_json(folder, **changes)


@pytest.mark.parametrize(
    ("model_type", "architecture", "changes", "reason"),
    [
        ("t5", "T5ForConditionalGeneration", {}, "encoder-decoder"),
        ("bert", "BertForMaskedLM", {}, "no causal language-model head"),
        ("llama", "LlamaForSequenceClassification", {}, "no causal language-model head"),
        ("vit", None, {}, "no causal language-model head"),
        ("llava", "LlavaForConditionalGeneration", {}, "multimodal (vision_config, text_config)"),
        ("mamba", "MambaForCausalLM", {}, "state-space layers"),
        ("rwkv", "RwkvForCausalLM", {}, "recurrent layers"),
        ("qwen3_next", "Qwen3NextForCausalLM", {"layer_types": ["hybrid"] * 48}, "hybrid layers"),
        ("qwen3_next", "Qwen3NextForCausalLM", {"layer_types": ["linear_attention"] * 48}, "without attention"),
        ("qwen3_next", "Qwen3NextForCausalLM", {"num_experts_per_tok": 513}, "num_experts_per_tok 513"),
        ("qwen3_5_text", "Qwen3_5ForCausalLM", {"attn_output_gate": False}, "its attn_output_gate is False, not True"),
        ("qwen3_5_text", "Qwen3_5ForCausalLM", {"output_gate_type": "sigmoid"}, "its output_gate_type is 'sigmoid'"),
        ("qwen3_5_moe_text", "Qwen3_5MoeForCausalLM", {"norm_topk_prob": False}, "its norm_topk_prob is False"),
        ("deepseek_v2", "DeepseekV2ForCausalLM", {"norm_topk_prob": True}, "its norm_topk_prob is True"),
        ("deepseek_v2", "DeepseekV2ForCausalLM", {"topk_method": "noaux_tc"}, "its topk_method is 'noaux_tc', not"),
        ("deepseek_v2", "DeepseekV2ForCausalLM", {"topk_method": "group_limited_greedy"}, "no num_experts_per_tok"),
        (
            "deepseek_v2",
            "DeepseekV2ForCausalLM",
            {"topk_method": "group_limited_greedy", "num_experts_per_tok": 2},
            "no n_group, which its choice of experts needs",
        ),
        ("deepseek_v3", "DeepseekV3ForCausalLM", {"scoring_func": "softmax"}, "its scoring_func is 'softmax', not"),
        ("lfm2", "Lfm2ForCausalLM", {"use_pos_enc": False}, "its use_pos_enc is False"),
        ("lfm2_moe", "Lfm2MoeForCausalLM", {"layer_types": None}, "no layer_types"),
        ("kimi_linear", "KimiLinearForCausalLM", {"mla_use_nope": False}, "its mla_use_nope is False"),
        ("qwen3_5_text", "Qwen3_5ForCausalLM", {"hidden_act": "gelu_pytorch_tanh"}, "its hidden_act is"),
        ("qwen3_5_moe_text", "Qwen3_5MoeForCausalLM", {"num_experts": 0}, "0 experts; it must have at least 1"),
        ("llama4_text", "Llama4ForCausalLM", {}, "chunked_attention layers"),
        ("lfm2", "Lfm2ForCausalLM", {"layer_types": ["conv"] * 32}, "without attention"),
        ("gemma4_text", "Gemma4ForCausalLM", {}, "layers of different sizes"),
        ("glm_moe_dsa", "GlmMoeDsaForCausalLM", {}, "sparse attention"),
        ("deepseek_v3", "DeepseekV3ForCausalLM", {"head_dim": 16}, "inconsistent sizes"),
        (
            "phimoe",
            "PhimoeForCausalLM",
            {"sliding_window": 64},
            "a sliding window of 64 positions that its attention ignores",
        ),
        ("mistral", "MistralForCausalLM", {"sliding_window": -1}, "sliding_window -1; it must be at least 1"),
        ("mixtral", "MixtralForCausalLM", {"num_experts_per_tok": 9}, "num_experts_per_tok 9; it must be from 1 to"),
        ("glm4_moe", "Glm4MoeForCausalLM", {"n_shared_experts": 0}, "n_shared_experts 0; it must be at least 1"),
        ("glm4_moe", "Glm4MoeForCausalLM", {"n_group": 5}, "n_group 5 and topk_group 1; n_group must divide its 128"),
        ("glm4_moe", "Glm4MoeForCausalLM", {"n_group": 64}, "its best groups have only 2 experts"),
        ("glm4_moe", "Glm4MoeForCausalLM", {"n_group": 128}, "n_group 128; it must be 1 or at most half of its 128"),
        ("gpt_oss", "GptOssForCausalLM", {"num_local_experts": 0}, "0 experts; it must have at least 1"),
        ("gemma2", "Gemma2ForCausalLM", {"sliding_window": None}, "sliding_attention layers, but no sliding_window"),
        ("bloom", "BloomForCausalLM", {}, "position biases (ALiBi)"),
        ("diffllama", "DiffLlamaForCausalLM", {}, "differential attention"),
        ("doge", "DogeForCausalLM", {}, "custom attention masks"),
        ("bert", "BertLMHeadModel", {}, "bidirectional attention"),
        ("stablelm", "StableLmForCausalLM", {}, "attention outside transformers' attention interface"),
        ("gptj", "GPTJForCausalLM", {}, "attention outside transformers' attention interface"),
    ],
)
def test_unsupported_models_are_refused_before_weights_are_read(
    tmp_path: Path, model_type: str, architecture: str | None, changes: dict[str, Any], reason: str
) -> None:
    config = AutoConfig.for_model(model_type, **changes)
    message = refusal(save_config(tmp_path, config, architectures=[architecture] if architecture else None))
    assert reason in message
    assert model_type in message
    assert message.endswith("docs/models.md lists the supported models")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("architectures", [1]),
        ("architectures", "LlamaForCausalLM"),
        ("layer_types", [1, 2, 3]),
        ("layer_types", ["linear_attention", "full_attention", "full_attention"]),
        ("sliding_window", "x"),
        ("rope_parameters", [1]),
        ("rope_parameters", {"sliding_attention": {"rope_theta": 0}}),
        ("attn_logit_softcapping", 0.0),
        ("query_pre_attn_scalar", -4),
        ("moe_intermediate_size", -3),
        ("num_local_experts", -1),
    ],
)
def test_invalid_values_are_refused(tmp_path: Path, key: str, value: object) -> None:
    message = refusal(save_config(tmp_path, tiny_config(architectures=["LlamaForCausalLM"]), **{key: value}))
    assert key in message or str(tmp_path) in message or "linear_attention layers" in message


def test_recurrent_layers_need_the_fused_pass_on_one_rank(tmp_path: Path) -> None:
    config = small_config("qwen3_5_text", **DELTA_NET_SIZES)
    folder = save_config(tmp_path, config, architectures=["Qwen3_5ForCausalLM"])
    assert "this qwen3_5_text model runs only in the fused pass, but --fused is off" in refusal(folder, fused=False)
    sharded = refusal(folder, device="cpu", tensor_parallel=2)
    assert "cannot be sharded: qwen3_5_text is not one of the families" in sharded


def test_no_kernels_are_recommended_that_would_not_run(tmp_path: Path) -> None:
    """transformers recommends some, once per process, when its recurrent layers run in a check."""
    folder = save_config(
        tmp_path, small_config("qwen3_5_text", **DELTA_NET_SIZES), architectures=["Qwen3_5ForCausalLM"]
    )
    command = "import sys; from specpool.engine.models.config import *; load_config(EngineOptions(model=sys.argv[1]))"
    done = subprocess.run([sys.executable, "-c", command, folder], capture_output=True, text=True, check=True)
    assert "install" not in done.stderr


@pytest.mark.parametrize("content", ["", "{", "[]", '{"model_type": "no such thing"}'])
def test_invalid_files_are_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "config.json").write_text(content)
    assert str(tmp_path) in refusal(tmp_path)


LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10_000.0,
    "original_max_position_embeddings": 64,  # one longer sequence would change the logits of its whole batch
    "short_factor": [1.0] * 8,
    "long_factor": [4.0] * 8,
}
LONGROPE_4096 = {**LONGROPE, "original_max_position_embeddings": 4096}


def test_partly_supported_models_need_a_lower_max_model_len(tmp_path: Path) -> None:
    folder = save_model(tmp_path, tiny_config(rope_parameters=LONGROPE))
    assert refusal(folder).endswith("serve it with --max-model-len 64 (see docs/models.md)")
    assert refusal(folder, max_model_len=65).endswith("serve it with --max-model-len 64 (see docs/models.md)")
    engine = load_engine(folder, max_model_len=64)
    tokens = random_tokens(64)
    torch.testing.assert_close(decode_alone(engine, tokens), transformers_logits(folder, tokens), atol=1e-4, rtol=1e-4)


def test_the_refusal_suggests_the_lowest_limit_of_a_model(tmp_path: Path) -> None:
    ropes = {"full_attention": LONGROPE, "sliding_attention": {**LONGROPE, "original_max_position_embeddings": 48}}
    folder = save_config(tmp_path, small_config("gemma3_text", rope_parameters=ropes))
    assert refusal(folder).endswith("serve it with --max-model-len 48 (see docs/models.md)")


@pytest.mark.parametrize(
    ("config", "option", "limit", "expected"),
    [
        (tiny_config(max_position_embeddings=100), None, 100, 100),
        (tiny_config(max_position_embeddings=40_960), None, 40_960, 40_960),
        (tiny_config(max_position_embeddings=9_999), 5_000, 9_999, 5_000),
        (small_config("qwen2", sliding_window=64, use_sliding_window=False), None, MAX_MODEL_LEN, MAX_MODEL_LEN),
        (small_config("mistral", sliding_window=5_000, max_position_embeddings=9_999), None, 9_999, 9_999),
        (tiny_config(rope_parameters=LONGROPE_4096, max_position_embeddings=9_999), None, 9_999, 4096),
    ],
    ids=["short", "long", "option", "no window", "window", "longrope"],
)
def test_max_model_len_defaults_to_the_models_limit(
    tmp_path: Path, config: PreTrainedConfig, option: int | None, limit: int, expected: int
) -> None:
    folder = save_model(tmp_path, config)
    assert load_model(EngineOptions(model=str(folder), max_model_len=option)).max_model_len == expected
    message = refusal(folder, max_model_len=limit + 1)
    assert message == f"--max-model-len {limit + 1} exceeds the model's {limit} positions"


# --- Missing or foreign files


def test_missing_files_are_refused_by_path(tmp_path: Path) -> None:
    for path in (tmp_path / "nowhere", tmp_path / "model.gguf"):
        assert refusal(path) == f"{path}: no such file or folder"
    assert refusal(tmp_path) == f"{tmp_path} is not a model folder: it has no config.json"
    (tmp_path / "model.bin").write_bytes(b"weights")
    assert refusal(tmp_path / "model.bin").endswith("model.bin is neither a model folder nor a .gguf file")
    (tmp_path / "some.gguf").write_bytes(b"GGUF")
    assert refusal(tmp_path) == f"{tmp_path / 'some.gguf'} is not a complete GGUF file: it ends within its header"


@pytest.mark.parametrize("model", ["nobody-at-all/no-such-model", "no-such-model", "not a hub id!", "a/b/c/d"])
def test_models_that_are_not_cached_are_refused_offline(model: str) -> None:
    assert refusal(model) == f"{model} is not in the local cache, and HF_HUB_OFFLINE forbids a download"


def test_local_models_have_no_revision(tiny_pair: tuple[Path, Path], tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    for model in (tiny_pair[0], tmp_path / "model.gguf"):
        message = refusal(model, revision="main")
        assert message == f"revision main: {model} is local; only hub models have revisions"
