"""FP8 checkpoints with block scales are dequantized when read; other quantized checkpoints are refused."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import edit_json, edited_weights, refusal, save_model, small_config
from transformers import FineGrainedFP8Config, GgufConfig

from specpool.engine.config.options import EngineOptions
from specpool.engine.models.checkpoint_quantization import HINT, dequantization_arguments
from specpool.engine.models.loading import load_model

BLOCK = 128
MAX_FP8 = 448
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": [BLOCK, BLOCK]}
SIZES = {
    "hidden_size": BLOCK,
    "intermediate_size": 2 * BLOCK,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 16,
}
EXPERTS = {"moe_intermediate_size": BLOCK, "num_experts": 4, "num_experts_per_tok": 2}


def to_fp8(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize a weight to FP8 with a bfloat16 scale per block, as in Qwen3's checkpoints."""
    blocks = weight.unflatten(1, (-1, BLOCK)).unflatten(0, (-1, BLOCK))  # [rows, BLOCK, columns, BLOCK]
    scale = (blocks.abs().amax((1, 3)) / MAX_FP8).bfloat16()
    rounded = (blocks / scale.float()[:, None, :, None]).to(torch.float8_e4m3fn)
    return rounded.view(weight.shape), scale


def from_fp8(weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return weight.float() * scale.float().repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)


def save_fp8(folder: Path, architecture: str, **changes: Any) -> tuple[Path, Path]:
    """Save a model with FP8 layers and other weights in bfloat16 or float32, and the same model in float32."""
    config = small_config(architecture, **{**SIZES, **changes})
    stored, plain = save_model(folder / "fp8", config), save_model(folder / "plain", config)
    quantized, dense = {}, {}
    for name, weight in load_file(stored / "model.safetensors").items():
        if name.endswith("proj.weight"):
            quantized[name], quantized[f"{name}_scale_inv"] = to_fp8(weight)
            dense[name] = from_fp8(quantized[name], quantized[f"{name}_scale_inv"])
        else:
            quantized[name] = weight if "norm" in name else weight.bfloat16()
            dense[name] = quantized[name].float()
    save_file(quantized, stored / "model.safetensors", metadata={"format": "pt"})
    save_file(dense, plain / "model.safetensors", metadata={"format": "pt"})
    return edit_json(stored, quantization_config=FP8), plain


@pytest.mark.parametrize(
    ("architecture", "changes", "dtype"),
    [
        ("qwen3", {}, torch.float32),
        ("qwen3", {}, torch.bfloat16),
        ("llama", {"tie_word_embeddings": True}, torch.float32),
        ("glm4", {}, torch.bfloat16),
        ("qwen3_moe", EXPERTS, torch.float32),
    ],
)
def test_fp8_weights_are_dequantized_to_the_dtype(
    tmp_path: Path, architecture: str, changes: dict[str, Any], dtype: torch.dtype
) -> None:
    quantized, plain = save_fp8(tmp_path, architecture, **changes)
    options = {"device": "cpu", "dtype": str(dtype).removeprefix("torch.")}
    loaded = load_model(EngineOptions(model=str(quantized), **options))
    reference = load_model(EngineOptions(model=str(plain), **options)).model.state_dict()
    weights = loaded.model.state_dict()
    assert weights.keys() == reference.keys()
    assert {weight.dtype for weight in weights.values()} == {dtype}
    assert all(torch.equal(weights[name], weight) for name, weight in reference.items())
    assert loaded.notes == (f"fp8 weights were dequantized to {options['dtype']}: {dtype.itemsize} bytes each",)


@pytest.mark.parametrize(
    ("changes", "quantization", "reason"),
    [
        ({"intermediate_size": 192}, {}, "in blocks of 128 x 128, but intermediate_size 192 is not a multiple"),
        ({"hidden_size": 64}, {}, "in blocks of 128 x 128, but hidden_size 64 is not a multiple of that"),
        ({"num_key_value_heads": 4}, {}, "but num_key_value_heads x head_dim 64 is not a multiple of that"),
        ({}, {"weight_block_size": None}, "without a scale for each block"),
        ({}, {"weight_block_size": [128, 0]}, "without a scale for each block"),
        ({}, {"scale_fmt": "ue8m0"}, "without a scale for each block"),
    ],
    ids=["intermediate", "hidden", "heads", "no blocks", "no size", "exponents"],
)
def test_unsupported_fp8_is_refused(
    tmp_path: Path, changes: dict[str, Any], quantization: dict[str, Any], reason: str
) -> None:
    small_config("qwen3", **{**SIZES, **changes}, architectures=["Qwen3ForCausalLM"]).save_pretrained(tmp_path)
    message = refusal(edit_json(tmp_path, quantization_config={**FP8, **quantization}))
    assert message.startswith("this qwen3 model is quantized to fp8 ")
    assert reason in message
    assert message.endswith(HINT)


NAMED = ("awq", "gptq", "compressed-tensors", "mxfp4", "fbgemm_fp8", "torchao", "a future method")


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
    quantized, _ = save_fp8(tmp_path, "qwen3")
    with edited_weights(quantized) as weights:
        for name in [name for name in weights if name.endswith("weight_scale_inv")]:
            weights[name.replace("weight_scale_inv", scale)] = weights.pop(name)
    message = refusal(edit_json(quantized, quantization_config=None))
    assert f"the weights are quantized, as model.layers.0.mlp.down_proj.{scale} shows" in message
    assert message.endswith(HINT)


def test_transformers_always_dequantizes() -> None:
    config = small_config("qwen3", **SIZES)
    assert dequantization_arguments(config, {}) == {}
    (gguf,) = dequantization_arguments(config, {"gguf_file": "model.gguf"}).values()
    assert (type(gguf), gguf.dequantize) == (GgufConfig, True)
    config.quantization_config = FP8
    (fp8,) = dequantization_arguments(config, {}).values()
    assert (type(fp8), fp8.dequantize) == (FineGrainedFP8Config, True)
