"""Parses the storage formats of quantized checkpoints, and unpacks their weights.

The arithmetic is float32. The reference packages (AutoAWQ, AutoGPTQ, compressed-tensors) define the layouts.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from math import ceil
from typing import Any

import torch

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""Output index of each 4-bit number in a word, starting with the least significant bits."""
FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
COMPRESSED = {
    "pack-quantized": (("int", 4), ("int", 8)),
    "int-quantized": (("int", 8),),
    "float-quantized": (("float", 8),),
    "naive-quantized": (("int", 8), ("float", 8)),
    "nvfp4-pack-quantized": (("float", 4),),
}
"""Supported types and bit widths by compressed-tensors format."""
STRATEGIES = ("tensor", "channel", "group", "tensor_group", "block")

Block = tuple[int, int]
"""Rows and columns that share a scale; 0 means all of them."""


class Parts(dict[str, torch.Tensor]):
    """The stored tensors of one weight, keyed by name ending."""

    def __missing__(self, ending: str) -> torch.Tensor:
        raise ValueError(f"a quantized weight has no {ending}, only {', '.join(sorted(self))}")


@dataclass(frozen=True)
class Numbers:
    """An unpacked weight [outputs, inputs] that is not scaled yet. Its value is (codes - zeros) * scale."""

    codes: torch.Tensor  # [outputs, inputs]
    scale: torch.Tensor
    """One scale, one per output ([outputs] or [outputs, 1]) or one per block. `zeros` may have the same shapes."""
    zeros: torch.Tensor | None = None
    block: Block = (1, 1)

    def dequantized(self) -> torch.Tensor:
        """Return the weight in float32. Raises ValueError if the number of blocks is wrong."""
        dense = self.codes.float()
        if self.zeros is not None:
            dense -= spread(self.zeros.float(), self.block, dense.shape)
        return dense.mul_(spread(self.scale.float(), self.block, dense.shape))


@dataclass(frozen=True)
class PackedFormat:
    endings: tuple[str, ...]
    """Name endings of the tensors that replace or complete a weight."""
    decode: Callable[[Parts], Numbers | torch.Tensor]
    """Unpacks a weight, or dequantizes it to float32. Raises ValueError."""
    packing: int = 1
    """Maximum number of weights packed into one stored element."""
    integers: bool = True
    """Whether compiled passes can use some of these weights without dequantizing them."""
    suffix: str = ".weight"
    """Replaces the ending to form the name of the weight."""


def _require(field: str, value: object, supported: tuple[object, ...]) -> None:
    if value not in supported or isinstance(value, float):  # 4.0 == 4, but is not a bit width
        raise ValueError(f"{field} {value!r}")


def _mapping(field: str, value: object) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"{field} {value!r}")
    return value


def _group_size(fields: dict[str, Any]) -> int:
    """Return the number of inputs that share a scale; 0 means all of them."""
    size = fields.get("group_size")
    if type(size) is not int or size < -1 or size == 0:
        raise ValueError(f"group_size {size!r}")
    return max(size, 0)


def _awq_format(fields: dict[str, Any]) -> PackedFormat:
    for field in ("version", "format"):
        _require(field, str(fields.get(field) or "gemm").lower(), ("gemm",))
    _require("backend", fields.get("backend", "autoawq"), ("autoawq", "auto"))
    _require("bits", fields.get("bits", fields.get("w_bit")), (4,))
    _require("zero_point", fields.get("zero_point", True), (True,))
    decode = partial(_decode_awq, group_size=_group_size({"group_size": fields.get("q_group_size"), **fields}))
    return PackedFormat((".qweight", ".qzeros", ".scales"), decode, packing=8)


def _gptq_format(fields: dict[str, Any]) -> PackedFormat:
    _require("bits", fields.get("bits"), (4, 8, 2))
    version = fields.get("checkpoint_format") or "gptq"
    _require("checkpoint_format", version, ("gptq", "gptq_v2"))
    _require("is_marlin_format", fields.get("is_marlin_format", False), (False,))
    overrides = _mapping("dynamic", fields.get("dynamic") or {})
    if any(not str(pattern).startswith("-:") for pattern in overrides):  # "-:" excludes modules
        raise ValueError(f"dynamic {overrides!r}")
    offset = 1 if version == "gptq" else 0  # version 1 stores zero points minus 1
    size = _group_size(fields)
    reordered = bool(fields.get("desc_act")) and size > 0
    decode = partial(_decode_gptq, bits=fields["bits"], offset=offset, group_size=size, reordered=reordered)
    return PackedFormat((".qweight", ".qzeros", ".scales", ".g_idx"), decode, packing=32 // fields["bits"])


def _fp8_format(fields: dict[str, Any]) -> PackedFormat:
    _require("fmt", fields.get("fmt", "e4m3"), ("e4m3",))
    block = fields.get("weight_block_size")
    decode = partial(_decode_compressed, block=(0, 0) if block is None else _sides("weight_block_size", block))
    return PackedFormat((".weight_scale_inv", ".weight_scale"), decode, integers=False)


def _compressed_format(fields: dict[str, Any]) -> PackedFormat:
    for field in ("sparsity_config", "transform_config"):
        if fields.get(field) and _mapping(field, fields[field]).get("format") != "dense":
            raise ValueError(f"{field} {fields[field]!r}")
    blocks, packing, integers = set(), 1, False
    groups = fields.get("config_groups")
    for key, group in _mapping("config_groups", groups).items():
        weights = _mapping(f"config_groups.{key}", group).get("weights")
        if weights is None:
            continue
        weights = _mapping(f"config_groups.{key}.weights", weights)
        name = str(group.get("format") or fields.get("format"))
        _require("format", name, tuple(COMPRESSED))
        _require("type and num_bits", (weights.get("type"), weights.get("num_bits")), COMPRESSED[name])
        strategy = weights.get("strategy") or ("group" if weights.get("group_size") else "tensor")
        _require("strategy", strategy, STRATEGIES)
        blocks.add(_compressed_block(strategy, weights))
        integers |= weights["type"] == "int"
        if name.endswith("pack-quantized"):
            packing = 8
    sides = blocks - {(0, 0)} or blocks
    if len(sides) != 1:  # the files do not say which config group a weight belongs to
        raise ValueError(f"config_groups with {len(sides)} group sizes")
    endings = ("packed", "scale", "zero_point", "shape", "g_idx", "global_scale")
    (block,) = sides
    decode = partial(_decode_compressed, block=block)
    return PackedFormat(tuple(f".weight_{ending}" for ending in endings), decode, packing, integers)


def _compressed_block(strategy: str, weights: dict[str, Any]) -> Block:
    if strategy == "block":
        return _sides("block_structure", weights.get("block_structure"))
    return (1, _group_size(weights)) if "group" in strategy else (0, 0)


def _sides(field: str, block: object) -> Block:
    if isinstance(block, list | tuple) and len(block) == 2 and all(type(side) is int and side > 0 for side in block):
        return block[0], block[1]
    raise ValueError(f"{field} {block!r}")


PACKED_FORMATS: dict[str, Callable[[dict[str, Any]], PackedFormat]] = {
    "awq": _awq_format,
    "compressed-tensors": _compressed_format,
    "fp8": _fp8_format,
    "gptq": _gptq_format,
    "mxfp4": lambda fields: PackedFormat(("_blocks", "_scales"), _decode_mxfp4, packing=2, integers=False, suffix=""),
}
"""Parsers of `quantization_config` by method. They raise ValueError, naming the unsupported field."""


def _decode_awq(parts: Parts, group_size: int) -> Numbers:
    outputs = torch.tensor(AWQ_ORDER).argsort()
    codes, zeros = (
        _unpack(parts[name], 4, 1).unflatten(1, (-1, 8))[..., outputs].flatten(1).T for name in (".qweight", ".qzeros")
    )
    return Numbers(codes, parts[".scales"].T, zeros, (1, group_size))


def _decode_gptq(parts: Parts, bits: int, offset: int, group_size: int, reordered: bool) -> Numbers:
    codes, scale = _unpack(parts[".qweight"], bits, 0).T, parts[".scales"].T
    zeros = ((_unpack(parts[".qzeros"], bits, 1) + offset) & (2**bits - 1)).T
    return _by_group(
        Numbers(codes, scale, zeros, (1, group_size)), parts[".g_idx"] if reordered else parts.get(".g_idx")
    )


def _decode_compressed(parts: Parts, block: Block) -> Numbers:
    """Decode a compressed-tensors or `fp8` weight."""
    scale = parts[".weight_scale_inv" if ".weight_scale_inv" in parts else ".weight_scale"]
    zeros = parts.get(".weight_zero_point")
    if ".weight_packed" not in parts:
        return Numbers(parts[".weight"], scale, zeros, block)
    packed = parts[".weight_packed"]
    if packed.dtype == torch.uint8:
        return Numbers(_unpack_fp4(packed), scale.float() / parts[".weight_global_scale"].float(), None, block)
    rows, columns, bits = _packed_sizes(parts[".weight_shape"].flatten().tolist(), list(packed.shape))
    codes = _unpack(packed, bits, 1)[:, :columns]
    if zeros is None:
        zeros = torch.full((1, 1), 2 ** (bits - 1))
    else:  # packed zero points include the offset of the codes, int8 ones do not
        zeros = (
            _unpack(zeros, bits, 0)[:rows] if zeros.dtype == torch.int32 else zeros.to(torch.int16) + 2 ** (bits - 1)
        )
    groups = parts.get(".weight_g_idx")
    in_order = groups is None or bool((groups < 0).any())
    return _by_group(Numbers(codes, scale, zeros, block), None if in_order else groups)


def _decode_mxfp4(parts: Parts) -> torch.Tensor:
    """Decode the experts of gpt-oss. Return [experts, inputs, outputs]."""
    numbers = _unpack_fp4(parts["_blocks"])  # [experts, outputs, blocks, 32]
    exponents = parts["_scales"].to(torch.int32) - 127
    return torch.ldexp(numbers, exponents[..., None]).flatten(2).transpose(1, 2)


def _packed_sizes(shape: list[Any], words: list[int]) -> tuple[int, int, int]:
    """Return the rows, columns and bit width of a weight of this shape, packed into 32-bit words of that shape."""
    for bits in (4, 8):
        if len(shape) == 2 and words == [shape[0], ceil(shape[1] * bits / 32)]:
            return shape[0], shape[1], bits
    raise ValueError(f"weight_shape {shape} does not match weight_packed of shape {words}")


def _unpack(words: torch.Tensor, bits: int, dimension: int) -> torch.Tensor:
    """Unpack unsigned integers from 32-bit words along a dimension, least significant bits first."""
    words = words.movedim(dimension, -1)
    numbers = [(words >> shift & (2**bits - 1)).to(torch.uint8) for shift in range(0, 32, bits)]
    return torch.stack(numbers, -1).flatten(-2).movedim(-1, dimension)


def _unpack_fp4(packed: torch.Tensor) -> torch.Tensor:
    codes = torch.stack([packed & 15, packed >> 4], -1).flatten(-2)
    return torch.tensor(FP4)[codes.int()]


def _by_group(numbers: Numbers, groups: torch.Tensor | None) -> Numbers:
    """Give each input the scale and zero point of its group, unless the groups are in order."""
    inputs, size = numbers.codes.shape[1], numbers.block[1]
    if groups is None or (size and torch.equal(groups.long(), torch.arange(inputs) // size)):
        return numbers
    if bool((groups < 0).any()):
        raise ValueError("g_idx has negative groups")
    per_group = (numbers.scale, numbers.zeros)
    scale, zeros = (each if each is None or each.shape[1] == 1 else each[:, groups.long()] for each in per_group)
    assert scale is not None
    return Numbers(numbers.codes, scale, zeros)


def spread(numbers: torch.Tensor, block: Block, shape: torch.Size) -> torch.Tensor:
    """Repeat each block's number over its rows and columns. Dimensions of size 1 are left to broadcasting."""
    if numbers.dim() < 2:  # one for the whole weight, or one per row
        numbers = numbers.reshape(-1, 1)
    for dimension, (side, size) in enumerate(zip(block, shape, strict=True)):
        stored = numbers.shape[dimension]
        if stored in (1, size):
            continue
        if not side or stored != ceil(size / side):
            given = f"{list(numbers.shape)} scales for {list(shape)} weights"
            raise ValueError(f"{given} do not match the group or block size of quantization_config")
        numbers = numbers.repeat_interleave(side, dimension).narrow(dimension, 0, size)
    return numbers
