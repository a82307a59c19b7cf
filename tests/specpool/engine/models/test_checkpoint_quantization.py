"""Unsupported quantized checkpoints are refused, and the message names the field."""

from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
from packed_checkpoints import FORMATS, save_packed
from tiny_models import edit_json, edited_weights, refusal, small_config

from specpool.engine.models.checkpoint_quantization import HINT


def weights_with(name: str, **fields: Any) -> dict[str, Any]:
    """Return the configuration of a compressed-tensors format with changed fields of its weights."""
    quantization = deepcopy(FORMATS[name].quantization)
    quantization["config_groups"]["group_0"]["weights"].update(fields)
    return quantization


def format_with(name: str, **fields: Any) -> dict[str, Any]:
    return {**FORMATS[name].quantization, **fields}


@pytest.mark.parametrize(
    ("quantization", "reason"),
    [
        (format_with("awq", version="gemv"), "awq with version 'gemv'"),
        (format_with("awq", bits=3), "awq with bits 3"),
        (format_with("awq", group_size=0), "awq with group_size 0"),
        (format_with("gptq", bits=3), "gptq with bits 3"),
        (format_with("gptq", bits=4.0), "gptq with bits 4.0"),
        (format_with("gptq", checkpoint_format="marlin"), "gptq with checkpoint_format 'marlin'"),
        (format_with("gptq", group_size="128"), "gptq with group_size '128'"),
        (format_with("gptq", dynamic={"+:.*up_proj": {"bits": 8}}), "gptq with dynamic {"),
        (format_with("gptq", dynamic=3), "gptq with dynamic 3"),
        (format_with("fp8-block", weight_block_size=[128, 0]), "fp8 with weight_block_size [128, 0]"),
        (format_with("fp8-block", fmt="e5m2"), "fp8 with fmt 'e5m2'"),
        (format_with("w4a16", format="marlin-24"), "compressed-tensors with format 'marlin-24'"),
        (format_with("w4a16", sparsity_config="2:4"), "compressed-tensors with sparsity_config '2:4'"),
        (format_with("w4a16", config_groups=[4]), "compressed-tensors with config_groups [4]"),
        (format_with("w4a16", config_groups={"a": "W4A16"}), "compressed-tensors with config_groups.a 'W4A16'"),
        (format_with("w4a16", config_groups={}), "compressed-tensors with config_groups with 0 group sizes"),
        (format_with("w4a16", sparsity_config={"format": "24"}), "compressed-tensors with sparsity_config {"),
        (weights_with("w4a16", num_bits=2), "compressed-tensors with type and num_bits ('int', 2)"),
        (weights_with("w4a16", group_size=None), "compressed-tensors with group_size None"),
        (weights_with("int8", strategy="token"), "compressed-tensors with strategy 'token'"),
        (weights_with("int8", strategy="block"), "compressed-tensors with block_structure None"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_unsupported_fields_are_refused_before_weights_are_read(
    tmp_path: Path, quantization: dict[str, Any], reason: str
) -> None:
    small_config("qwen3", architectures=["Qwen3ForCausalLM"]).save_pretrained(tmp_path)  # and no weights
    message = refusal(edit_json(tmp_path, quantization_config=quantization))
    assert message.startswith(f"this qwen3 model is quantized by {reason}")
    assert message.endswith(f", which is not supported; {HINT}")


@pytest.mark.parametrize(
    ("name", "part", "reason"),
    [
        ("fp8-block", ".weight_scale_inv", "is stored as F8_E4M3, but has no scale"),
        ("int8", ".weight_scale", "is stored as I8, but has no scale"),
        ("gptq-act-order", ".g_idx", "a quantized weight has no .g_idx"),
    ],
)
def test_weights_without_a_required_part_are_refused(tmp_path: Path, name: str, part: str, reason: str) -> None:
    quantized, _ = save_packed(tmp_path, "llama", FORMATS[name])
    with edited_weights(quantized) as weights:
        weights.pop(f"model.layers.0.mlp.down_proj{part}")
    message = refusal(quantized)
    assert "model.layers.0.mlp.down_proj.weight" in message
    assert reason in message


NAMED = ("fbgemm_fp8", "modelopt", "torchao", "a future method")


@pytest.mark.parametrize(
    ("method", "quantization"),
    [
        *((method, {"quant_method": method, "bits": 4}) for method in NAMED),
        ("bitsandbytes", {"quant_method": "bitsandbytes", "load_in_4bit": True}),
        ("bitsandbytes", {"load_in_8bit": True}),
        ("an unnamed method", {}),
    ],
)
def test_unsupported_methods_are_refused_by_name(tmp_path: Path, method: str, quantization: dict[str, Any]) -> None:
    small_config("qwen3", architectures=["Qwen3ForCausalLM"]).save_pretrained(tmp_path)  # and no weights
    message = refusal(edit_json(tmp_path, quantization_config=quantization))
    assert message == f"this qwen3 model is quantized by {method}, which is not supported; {HINT}"


@pytest.mark.parametrize("scale", ["weight_scale", "weight_scale_inv"])
def test_scales_without_a_quantization_method_are_refused(tmp_path: Path, scale: str) -> None:
    quantized, _ = save_packed(tmp_path, "qwen3", FORMATS["fp8-block"])
    with edited_weights(quantized) as weights:
        for name in [name for name in weights if name.endswith("weight_scale_inv")]:
            weights[name.replace("weight_scale_inv", scale)] = weights.pop(name)
    message = refusal(edit_json(quantized, quantization_config=None))
    assert f"the weights are quantized, as model.layers.0.mlp.down_proj.{scale} shows" in message
    assert message.endswith(HINT)
