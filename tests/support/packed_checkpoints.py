"""Packs the weights of small models in published quantized formats, and returns the weights they represent."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tiny_models import edit_json, save_model, small_config

from specpool.engine.models.packed_formats import AWQ_ORDER, FP4

GROUP, BLOCK = 16, 32  # inputs per group scale; rows and columns per block scale
Packed = tuple[dict[str, torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class PackedFormat:
    """`pack`: maps a weight [outputs, inputs] to tensors keyed by name ending, and to the weight they represent."""

    pack: Callable[[torch.Tensor], Packed]
    quantization: dict[str, Any]


def pack_words(numbers: torch.Tensor, bits: int, dimension: int) -> torch.Tensor:
    groups = numbers.movedim(dimension, -1)
    groups = torch.nn.functional.pad(groups, (0, -groups.shape[-1] % (32 // bits))).unflatten(-1, (-1, 32 // bits))
    words = (groups.long() << torch.arange(0, 32, bits)).sum(-1)
    return words.to(torch.int32).movedim(-1, dimension).contiguous()


def round_groups(weight: torch.Tensor, bits: int, size: int, symmetric: bool) -> tuple[torch.Tensor, ...]:
    """Return unsigned integers [outputs, inputs], and zero points and half-precision scales [outputs, groups]."""
    groups, top = weight.unflatten(1, (-1, size)), 2**bits - 1
    low, high = groups.amin(-1), groups.amax(-1)
    if symmetric:
        high = torch.maximum(high, -low)
        low = -high
    scale = ((high - low) / top).half()
    zero = torch.full_like(scale, 2 ** (bits - 1)) if symmetric else (-low / scale.float()).round().clamp(0, top)
    numbers = (groups / scale.float()[..., None] + zero[..., None]).round().clamp(0, top)
    return numbers.flatten(1).int(), zero.int(), scale


def unrounded(numbers: torch.Tensor, zero: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    groups = numbers.unflatten(1, (zero.shape[1], -1))
    return ((groups - zero[..., None]).float() * scale.float()[..., None]).flatten(1)


def awq(weight: torch.Tensor) -> Packed:
    numbers, zero, scale = round_groups(weight, 4, GROUP, symmetric=False)
    words = [pack_words(each.T.unflatten(1, (-1, 8))[..., AWQ_ORDER].flatten(1), 4, 1) for each in (numbers, zero)]
    parts = {".qweight": words[0], ".qzeros": words[1], ".scales": scale.T}
    return parts, unrounded(numbers, zero, scale)


def gptq(
    weight: torch.Tensor,
    bits: int = 4,
    offset: int = 1,
    act_order: bool = False,
    symmetric: bool = False,
    size: int = GROUP,
) -> Packed:
    inputs = weight.shape[1]
    groups = (torch.randperm(inputs) if act_order else torch.arange(inputs)) // size  # of each input
    by_group = groups.argsort(stable=True)
    numbers, zero, scale = round_groups(weight[:, by_group], bits, size, symmetric)
    dense = unrounded(numbers, zero, scale)[:, by_group.argsort()]
    stored = numbers[:, by_group.argsort()]
    zeros = pack_words((zero - offset).T & (2**bits - 1), bits, 1)
    parts = {".qweight": pack_words(stored.T, bits, 0), ".qzeros": zeros, ".scales": scale.T, ".g_idx": groups.int()}
    return parts, dense


def packed_integers(weight: torch.Tensor, bits: int = 4, symmetric: bool = True, size: int = GROUP) -> Packed:
    numbers, zero, scale = round_groups(weight, bits, size or weight.shape[1], symmetric)
    shape = torch.tensor(weight.shape)
    parts = {".weight_packed": pack_words(numbers, bits, 1), ".weight_scale": scale, ".weight_shape": shape}
    if not symmetric:
        parts[".weight_zero_point"] = pack_words(zero, bits, 0)
    return parts, unrounded(numbers, zero, scale)


def int8_channels(weight: torch.Tensor) -> Packed:
    numbers, zero, scale = round_groups(weight, 8, weight.shape[1], symmetric=True)
    parts = {".weight": (numbers - zero).to(torch.int8), ".weight_scale": scale}
    return parts, unrounded(numbers, zero, scale)


def fp8(weight: torch.Tensor, rows: int, columns: int, name: str = ".weight_scale") -> Packed:
    """Quantize to FP8 with a bfloat16 scale per block of rows and columns; 0 means all of them."""
    height, width = weight.shape
    rows, columns = rows or height, columns or width
    padded = torch.nn.functional.pad(weight, (0, -width % columns, 0, -height % rows))
    blocks = padded.unflatten(1, (-1, columns)).unflatten(0, (-1, rows))
    scale = (blocks.abs().amax((1, 3)) / torch.finfo(torch.float8_e4m3fn).max).bfloat16()
    each = scale.float().repeat_interleave(rows, 0).repeat_interleave(columns, 1)[:height, :width]
    numbers = (weight / each).to(torch.float8_e4m3fn)
    return {".weight": numbers, name: scale.flatten() if scale.numel() == 1 else scale}, numbers.float() * each


def to_fp4(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the nearest FP4 numbers, packed two per byte, and their values."""
    codes = weight.unsqueeze(-1).sub(torch.tensor(FP4)).abs().argmin(-1)
    packed = codes[..., 0::2] | codes[..., 1::2] << 4
    return packed.to(torch.uint8), torch.tensor(FP4)[codes]


def nvfp4(weight: torch.Tensor) -> Packed:
    groups = weight.unflatten(1, (-1, 16))
    scale_of_scales = 6 * torch.finfo(torch.float8_e4m3fn).max / weight.abs().max()[None]
    scale = (groups.abs().amax(-1) / 6 * scale_of_scales).to(torch.float8_e4m3fn)
    each = (scale.float() / scale_of_scales)[..., None]
    packed, values = to_fp4(groups / each)
    parts = {
        ".weight_packed": packed.flatten(1),
        ".weight_scale": scale,
        ".weight_global_scale": scale_of_scales,
        ".input_global_scale": torch.ones(1),
    }
    return parts, (values * each).flatten(1)


def mxfp4(weight: torch.Tensor) -> Packed:
    """Pack the experts of gpt-oss, [experts, inputs, outputs]."""
    groups = weight.transpose(1, 2).unflatten(2, (-1, 32))  # [experts, outputs, blocks, 32]
    scale = (groups.abs().amax(-1) / 6).log2().ceil().int()
    packed, values = to_fp4(torch.ldexp(groups, -scale[..., None]))
    parts = {"_blocks": packed, "_scales": (scale + 127).to(torch.uint8)}
    return parts, torch.ldexp(values, scale[..., None]).flatten(2).transpose(1, 2)


def compressed(scheme: str, **weights: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": {"symmetric": True, **weights}}
    return {"quant_method": "compressed-tensors", "format": scheme, "config_groups": {"group_0": group}}


AWQ = {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False, "sym": False}
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": [BLOCK, BLOCK]}
GROUPS = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": GROUP}
INT8_CHANNELS = {"num_bits": 8, "type": "int", "strategy": "channel"}
FLOAT8 = {"num_bits": 8, "type": "float"}
FORMATS = {
    "awq": PackedFormat(awq, AWQ),
    "gptq": PackedFormat(gptq, GPTQ),
    "gptq-act-order": PackedFormat(lambda weight: gptq(weight, act_order=True), {**GPTQ, "desc_act": True}),
    "gptq-8": PackedFormat(lambda weight: gptq(weight, bits=8), {**GPTQ, "bits": 8}),
    "gptq-v2": PackedFormat(lambda weight: gptq(weight, offset=0), {**GPTQ, "checkpoint_format": "gptq_v2"}),
    "w4a16": PackedFormat(packed_integers, compressed("pack-quantized", **GROUPS)),
    "w4a16-zeros": PackedFormat(
        lambda weight: packed_integers(weight, symmetric=False), compressed("pack-quantized", **GROUPS)
    ),
    "w8a16": PackedFormat(
        lambda weight: packed_integers(weight, bits=8, size=0), compressed("pack-quantized", **INT8_CHANNELS)
    ),
    "int8": PackedFormat(int8_channels, compressed("int-quantized", **INT8_CHANNELS)),
    "fp8-channel": PackedFormat(
        lambda weight: fp8(weight, 1, 0), compressed("float-quantized", **FLOAT8, strategy="channel")
    ),
    "fp8-tensor": PackedFormat(
        lambda weight: fp8(weight, 0, 0), compressed("float-quantized", **FLOAT8, strategy="tensor")
    ),
    "fp8-block": PackedFormat(lambda weight: fp8(weight, BLOCK, BLOCK, ".weight_scale_inv"), FP8),
    "nvfp4": PackedFormat(
        nvfp4,
        compressed("nvfp4-pack-quantized", num_bits=4, type="float", strategy="tensor_group", group_size=16),
    ),
}
INTEGERS = {
    "gptq": PackedFormat(lambda weight: gptq(weight, symmetric=True, size=32), {**GPTQ, "group_size": 32, "sym": True}),
    "w4a16": PackedFormat(
        lambda weight: packed_integers(weight, size=64), compressed("pack-quantized", **{**GROUPS, "group_size": 64})
    ),
    "w8a16-groups": PackedFormat(
        lambda weight: packed_integers(weight, bits=8, size=32),
        compressed("pack-quantized", **{**GROUPS, "group_size": 32, "num_bits": 8}),
    ),
    "w8a16": FORMATS["w8a16"],
    "int8": FORMATS["int8"],
}
"""Formats whose weights compiled passes can use without dequantizing them."""


def save_packed(
    folder: Path,
    architecture: str,
    packed: PackedFormat,
    ignore: str = "no module",
    also: str = "proj.weight",
    **changes: Any,
) -> tuple[Path, Path]:
    """Save a model with packed projections and other weights in bfloat16 or float32, and the same model in float32.

    `ignore`: name ending of projections that stay dense. `also`: name ending of other weights to pack.
    """
    config = small_config(architecture, **changes)
    quantized, plain = save_model(folder / "packed", config), save_model(folder / "plain", config)
    stored, dense = {}, {}
    for name, weight in load_file(plain / "model.safetensors").items():
        if name.endswith((also, "proj.weight", ".w1.weight", ".w2.weight", ".w3.weight")) and not name.endswith(ignore):
            parts, dense[name] = packed.pack(weight)
            stored.update({name.removesuffix(".weight") + ending: part for ending, part in parts.items()})
        else:
            stored[name] = weight if "norm" in name else weight.bfloat16()
            dense[name] = stored[name].float()
    for file, weights in ((quantized, stored), (plain, dense)):
        contiguous = {name: weight.contiguous() for name, weight in weights.items()}
        save_file(contiguous, file / "model.safetensors", metadata={"format": "pt"})
    return edit_json(quantized, quantization_config=packed.quantization), plain
