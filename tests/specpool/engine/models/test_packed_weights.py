"""Weights of quantized checkpoints are dequantized when read, bit for bit."""

import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from delta_nets import DELTA_NET_SIZES, RECURRENT_MODELS
from delta_nets import EXPERTS as DELTA_NET_EXPERTS
from packed_checkpoints import FORMATS, INTEGERS, PackedFormat, mxfp4, save_packed
from safetensors.torch import save_file
from tiny_models import (
    edit_json,
    edited_weights,
    load_engine,
    random_tokens,
    refusal,
    rows_that_differ,
    save_model,
    small_config,
)
from transformers import AutoModelForCausalLM
from vision_language import save_vision_language

from specpool.engine.cache.spans import Span
from specpool.engine.config.options import EngineOptions
from specpool.engine.models.config import load_config
from specpool.engine.models.loading import load_model
from specpool.engine.models.vision_language import is_text_weight
from specpool.engine.models.weights import read_weight, read_with_transformers
from specpool.engine.sharding.shares import Share, shard

EXPERTS = {"moe_intermediate_size": 64, "num_experts": 4, "num_experts_per_tok": 2}
LARGER = {"hidden_size": 128, "intermediate_size": 256}
UNEVEN = {"intermediate_size": 112}  # not a multiple of an FP8 block


@pytest.mark.parametrize(
    ("name", "architecture", "changes", "dtype"),
    [
        *((name, "llama", {}, torch.float32) for name in FORMATS),
        ("w4a16-zeros", "qwen3_moe", EXPERTS, torch.bfloat16),
        ("fp8-block", "qwen3_moe", EXPERTS, torch.float32),
        ("fp8-block", "glm4", UNEVEN, torch.bfloat16),
        ("fp8-block", "qwen3_next", {**DELTA_NET_SIZES, **DELTA_NET_EXPERTS}, torch.bfloat16),
        ("awq", "qwen3_5_text", DELTA_NET_SIZES, torch.float32),
        ("w4a16-zeros", "qwen3_5_moe_text", {**DELTA_NET_SIZES, **DELTA_NET_EXPERTS}, torch.float32),
        ("awq", "qwen2", {"tie_word_embeddings": True}, torch.bfloat16),
    ],
)
def test_weights_are_dequantized_bit_for_bit(
    tmp_path: Path, name: str, architecture: str, changes: dict[str, Any], dtype: torch.dtype
) -> None:
    quantized, plain = save_packed(tmp_path, architecture, FORMATS[name], "layers.0.self_attn.o_proj.weight", **changes)
    options = {"device": "cpu", "dtype": str(dtype).removeprefix("torch."), "weights": "float32"}
    loaded = load_model(EngineOptions(model=str(quantized), **options))
    expected = load_model(EngineOptions(model=str(plain), **options)).model
    weights = loaded.model.state_dict()
    assert weights.keys() == expected.state_dict().keys()
    assert {weight.dtype for weight in weights.values()} == {dtype}
    assert all(torch.equal(weights[each], weight) for each, weight in expected.state_dict().items())
    assert loaded.model.generation_config.eos_token_id == expected.generation_config.eos_token_id
    method = FORMATS[name].quantization["quant_method"]
    assert loaded.notes == (f"{method} weights were dequantized to {options['dtype']}: {dtype.itemsize} bytes each",)


def test_experts_of_gpt_oss_are_dequantized(tmp_path: Path) -> None:
    config = small_config("gpt_oss", num_local_experts=4, num_experts_per_tok=2, layer_types=["full_attention"] * 2)
    dense = AutoModelForCausalLM.from_config(config, dtype=torch.float32).state_dict()
    stored = dict(dense)
    for name in [name for name in dense if name.endswith("up_proj") or name.endswith("down_proj")]:
        parts, dense[name] = mxfp4(stored.pop(name))
        stored.update({name + ending: part for ending, part in parts.items()})
    save_file({name: weight.contiguous() for name, weight in stored.items()}, tmp_path / "model.safetensors")
    config.save_pretrained(tmp_path)
    config.quantization_config = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}
    options = EngineOptions(model=str(tmp_path))
    model, report = read_with_transformers(options, config, torch.device("cpu"), torch.float32)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    assert all(torch.equal(weight, dense[name]) for name, weight in model.state_dict().items())


@pytest.mark.parametrize("name", ["gptq-act-order", "fp8-block"])
def test_ranks_cut_dequantized_weights(tmp_path: Path, name: str) -> None:
    shards = []
    for folder in save_packed(tmp_path, "llama", FORMATS[name]):
        options = EngineOptions(model=str(folder), device="cpu")
        shards.append(load_model(options, Share(shard(load_config(options), 2, "whole"), 1)).model.state_dict())
    quantized, plain = shards
    assert quantized["model.layers.0.mlp.up_proj.weight"].shape == (48, 64)
    assert all(torch.equal(quantized[each], weight) for each, weight in plain.items())


@pytest.mark.parametrize(
    ("packed", "kind"),
    [
        (INTEGERS["gptq"], "Q4_0"),
        (INTEGERS["w4a16"], "Q4_0"),
        (INTEGERS["w8a16-groups"], "Q8_0"),
        (INTEGERS["w8a16"], "int8"),
        (INTEGERS["int8"], "int8"),
        (FORMATS["w4a16-zeros"], "float32"),
    ],
    ids=["gptq", "w4a16", "w8a16-groups", "w8a16", "int8", "w4a16-zeros"],
)
def test_logits_are_those_of_the_dequantized_model(tmp_path: Path, packed: PackedFormat, kind: str) -> None:
    folders = save_packed(tmp_path, "llama", packed, **LARGER)
    quantized, plain = (load_engine(folder, activations="float32") for folder in folders)
    span = [Span(0, 0, random_tokens(9), 9)]
    assert quantized.bitwise
    assert torch.equal(quantized.forward(span), plain.forward(span))
    assert quantized.weights_fingerprint == plain.weights_fingerprint
    assert quantized.numerics_fingerprint == plain.numerics_fingerprint
    assert quantized.info().weight_kinds.keys() == {kind, "bfloat16"}
    note = "compressed-tensors weights (tensors: 14) were dequantized to float32: 4 bytes each"
    assert quantized.notes == ([note] if kind == "float32" else [])


MIXTURES = {
    "mixtral": {"num_local_experts": 4},
    "qwen3_moe": {"moe_intermediate_size": 64, "num_experts": 4},
    "glm4_moe": {"moe_intermediate_size": 64, "n_routed_experts": 4, "first_k_dense_replace": 1},
}


@pytest.mark.parametrize("architecture", MIXTURES)
@pytest.mark.parametrize(("name", "kind"), [("w4a16", "Q4_0"), ("int8", "int8")])
def test_experts_stay_quantized(tmp_path: Path, architecture: str, name: str, kind: str) -> None:
    changes = {**LARGER, **MIXTURES[architecture], "num_experts_per_tok": 2}
    folders = save_packed(tmp_path, architecture, INTEGERS[name], **changes)
    quantized, plain = (load_engine(folder) for folder in folders)
    span = [Span(0, 0, random_tokens(9), 9)]
    assert quantized.bitwise
    assert torch.equal(quantized.forward(span), plain.forward(span))
    assert quantized.weights_fingerprint == plain.weights_fingerprint
    assert quantized.info().weight_kinds.keys() == {kind, "bfloat16"}
    assert not quantized.notes
    assert rows_that_differ(quantized) == 0
    unpacked = load_engine(folders[0], native=False)
    assert (unpacked.forward(span) - plain.forward(span)).abs().max() < 1e-4


@pytest.mark.parametrize(("architecture", "inputs"), [("qwen3_next", "qkvz"), ("qwen3_5_moe_text", "qkv")])
def test_reordered_inputs_of_delta_nets_stay_quantized(tmp_path: Path, architecture: str, inputs: str) -> None:
    changes = {**LARGER, **DELTA_NET_SIZES, **DELTA_NET_EXPERTS}
    folders = save_packed(tmp_path, architecture, INTEGERS["int8"], also=f"in_proj_{inputs}.weight", **changes)
    quantized, plain = map(load_engine, folders)
    span = [Span(0, 0, random_tokens(9), 9)]
    assert quantized.bitwise
    assert (quantized.forward(span) - plain.forward(span)).abs().max() < 1e-4
    assert quantized.weights_fingerprint == plain.weights_fingerprint


@pytest.mark.parametrize("name", ["lfm2", "kimi_linear"])
def test_names_of_a_family_belong_to_quantized_weights_too(tmp_path: Path, name: str) -> None:
    architecture, changes = RECURRENT_MODELS[name]
    folders = save_packed(tmp_path, architecture, INTEGERS["int8"], **changes)
    quantized, plain = (load_engine(folder, activations="float32") for folder in folders)
    span = [Span(0, 0, random_tokens(9), 9)]
    assert (quantized.forward(span) - plain.forward(span)).abs().max() < 1e-4


LATENT = {
    "q_lora_rank": 64, "kv_lora_rank": 64, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 32,
    "num_key_value_heads": 4,
}  # fmt: skip


@pytest.mark.parametrize(("name", "kind"), [("w4a16", "Q4_0"), ("int8", "int8")])
def test_only_absorbed_weights_are_dequantized(tmp_path: Path, name: str, kind: str) -> None:
    folders = save_packed(tmp_path, "youtu", INTEGERS[name], also="_with_mqa.weight", **LARGER, **LATENT)
    quantized, plain = (load_engine(folder) for folder in folders)
    span = [Span(0, 0, random_tokens(9), 9)]
    assert quantized.bitwise
    assert torch.equal(quantized.forward(span), plain.forward(span))
    assert quantized.weights_fingerprint == plain.weights_fingerprint
    kinds, absorbed = quantized.info().weight_kinds, 2 * 4 * 64 * (16 + 32)
    assert kinds.keys() == {kind, "float32", "bfloat16"}
    assert kinds["float32"] == 4 * absorbed


@pytest.mark.parametrize("native", [True, False])
def test_scaled_embeddings_stay_quantized(tmp_path: Path, native: bool) -> None:
    folders = save_packed(
        tmp_path, "gemma2", INTEGERS["int8"], also="embed_tokens.weight", **LARGER, tie_word_embeddings=True
    )
    quantized, plain = (load_engine(folder, native=native, activations="float32") for folder in folders)
    span = [Span(0, 0, random_tokens(9), 9)]
    assert torch.equal(quantized.forward(span), plain.forward(span))
    assert quantized.info().weight_kinds.keys() == {"int8" if native else "float32"}


def test_dequantized_experts_are_counted(tmp_path: Path) -> None:
    changes = {**LARGER, **MIXTURES["qwen3_moe"], "num_experts_per_tok": 2}
    quantized, plain = map(load_engine, save_packed(tmp_path, "qwen3_moe", FORMATS["awq"], **changes))
    span = [Span(0, 0, random_tokens(9), 9)]
    assert torch.equal(quantized.forward(span), plain.forward(span))
    assert quantized.notes == ["awq weights (tensors: 32) were dequantized to float32: 4 bytes each"]


def test_experts_of_different_shapes_are_refused(tmp_path: Path) -> None:
    changes = {**LARGER, **MIXTURES["qwen3_moe"], "num_experts_per_tok": 2}
    folder, _ = save_packed(tmp_path, "qwen3_moe", INTEGERS["int8"], **changes)
    with edited_weights(folder) as weights:
        for name in [name for name in weights if ".0.mlp.experts.1.up_proj" in name]:
            weights[name] = weights[name][:32].contiguous()
    assert "model.layers.0.mlp.experts have different shapes or lack weights" in refusal(folder)


def test_quantized_output_heads_are_read_alone(tmp_path: Path) -> None:
    quantized, plain = save_packed(tmp_path, "llama", FORMATS["fp8-channel"])
    weights = []
    for folder in (quantized, plain):
        options = EngineOptions(model=str(folder))
        weights.append(read_weight(options, load_config(options), "model.layers.0.mlp.up_proj.weight"))
    assert torch.equal(*weights)  # type: ignore[arg-type]


def test_weights_that_contradict_the_configuration_are_refused(tmp_path: Path) -> None:
    quantized, _ = save_packed(tmp_path, "llama", FORMATS["w4a16"])
    scale = "model.layers.0.mlp.up_proj.weight_scale"
    with edited_weights(quantized) as weights:
        weights[scale] = weights[scale][:, :3].contiguous()
    assert "[96, 3] scales for [96, 64] weights do not match the group or block size" in refusal(quantized)
    with edited_weights(quantized) as weights:
        del weights[scale]
    assert "a quantized weight has no .weight_scale, only .weight_packed" in refusal(quantized)
    with edited_weights(quantized) as weights:
        weights[scale.removesuffix("_scale")] = torch.zeros(96, 64)
    assert "mlp.up_proj.weight has .weight_packed, but is stored as F32" in refusal(quantized)
    (quantized / "model.safetensors").unlink()
    assert "it has no model.safetensors" in refusal(quantized)


SHAPE = r"weight_shape \[.*\] does not match weight_packed of shape \[96, 8\]"


@pytest.mark.parametrize(
    ("name", "part", "numbers", "reason"),
    [
        ("w4a16", ".weight_shape", torch.tensor(64), SHAPE),
        ("w4a16", ".weight_shape", torch.tensor([1, 96, 64]), SHAPE),
        ("w4a16", ".weight_packed", torch.zeros(0, 8, dtype=torch.int32), "weight_packed is empty"),
        ("awq", ".scales", torch.full((4, 96), torch.nan), "scales has NaN or infinite scales"),
        ("int8", ".weight_scale", torch.zeros(96, 1), "weight_scale is zero"),
        ("fp8-channel", ".weight_scale", -torch.ones(96, 1), "weight_scale has negative scales"),
        ("nvfp4", ".weight_global_scale", torch.tensor([torch.inf]), "weight_global_scale has NaN or infinite scales"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_impossible_parts_are_refused(tmp_path: Path, name: str, part: str, numbers: torch.Tensor, reason: str) -> None:
    quantized, _ = save_packed(tmp_path, "llama", FORMATS[name])
    with edited_weights(quantized) as weights:
        weights[f"model.layers.0.mlp.up_proj{part}"] = numbers
    assert re.search(f"layers.0.mlp.up_proj.weight: .*{reason}", refusal(quantized))


def test_corrections_of_routers_must_be_finite(tmp_path: Path) -> None:
    sizes = {"moe_intermediate_size": 64, "n_routed_experts": 4, "num_experts_per_tok": 2, "first_k_dense_replace": 1}
    folder = save_model(tmp_path, small_config("glm4_moe", **sizes))
    name = "model.layers.1.mlp.gate.e_score_correction_bias"
    with edited_weights(folder) as weights:
        weights[name][0] = torch.nan
    assert f"{name} has NaN or infinite values" in refusal(folder)


FP8_WRAPPERS = [(kind, "fp8-channel") for kind in ("mistral3", "qwen3_5", "qwen3_5_moe")]


@pytest.mark.parametrize(("kind", "name"), [("qwen2_5_vl", "awq"), *FP8_WRAPPERS])
def test_text_parts_are_dequantized(tmp_path: Path, kind: str, name: str) -> None:
    save_vision_language(tmp_path / "plain", kind, tie_word_embeddings=False)
    packed, stored = FORMATS[name], dict[str, torch.Tensor]()
    with edited_weights(tmp_path / "plain") as weights:
        for each, weight in weights.items():
            if is_text_weight(each) and each.endswith("proj.weight"):
                parts, dense = packed.pack(weight)
                weights[each] = dense.contiguous()
                stored.update({each.removesuffix(".weight") + ending: part for ending, part in parts.items()})
            else:
                stored[each] = weight
        stored = {each: weight.contiguous().clone() for each, weight in stored.items()}
    shutil.copytree(tmp_path / "plain", tmp_path / "packed")
    save_file(stored, tmp_path / "packed" / "model.safetensors", metadata={"format": "pt"})
    edit_json(tmp_path / "packed", quantization_config=packed.quantization)
    span = [Span(0, 0, random_tokens(9), 9)]
    quantized, plain = (load_engine(tmp_path / each, max_model_len=256) for each in ("packed", "plain"))
    assert torch.equal(quantized.forward(span), plain.forward(span))
