"""File formats of a trained draft's weights: the one that is shipped, and the one that draft workers load.

Both store matrices in 4-bit blocks, or in int8 with a scale per row, or per block for the input of a feature draft, and
norms in bfloat16.
"""

from collections.abc import Mapping
from pathlib import Path

import torch
from gguf import GGMLQuantizationType
from gguf.quants import quantize
from safetensors.torch import load_file, save_file

from specpool.engine.weights.quantization_types import INT8, QUANTIZATION_TYPES, QuantizationType
from specpool.engine.weights.quantized import Quantized, Weight, as_tensor

MAX_CODE = 127
INPUTS = ("fc", "project")
"""Matrices of a feature draft. Their columns differ too much for one scale per row."""
Q8_0 = QUANTIZATION_TYPES["Q8_0"]
SCALE = ".scale"


def save_compact(path: Path, trained: Mapping[str, Weight]) -> None:
    """Write quantized matrices as they are, other matrices [rows, columns] in int8, and other floats in bfloat16."""
    stored = {}
    for name, weight in trained.items():
        if isinstance(weight, Quantized):
            stored[_stored_name(name, weight)] = weight.data
        elif name in INPUTS and weight.shape[1] % Q8_0.block == 0:
            codes = quantize(weight.float().numpy(force=True), GGMLQuantizationType.Q8_0)
            stored[f"{name}.{Q8_0.name}"] = torch.from_numpy(codes)
        elif weight.is_floating_point() and weight.dim() == 2:
            # Clamped to the smallest normal number, so that a row of zeros has a scale.
            scale = (weight.float().abs().amax(1) / MAX_CODE).clamp_min(torch.finfo(torch.float32).tiny)
            stored[name], stored[name + SCALE] = (weight / scale[:, None]).round().to(torch.int8), scale
        else:
            stored[name] = weight.bfloat16() if weight.is_floating_point() else weight
    save_file({name: weight.contiguous() for name, weight in stored.items()}, path)


def load_compact(path: Path) -> dict[str, Weight]:
    """Load what `save_compact` wrote, with quantized matrices. Raises ValueError for invalid bytes."""
    stored = load_file(path)
    scales = {name: stored.pop(name) for name in list(stored) if name.endswith(SCALE)}
    loaded: dict[str, Weight] = {}
    for name, weight in stored.items():
        stem, _, suffix = name.rpartition(".")
        if suffix in QUANTIZATION_TYPES:
            loaded[stem] = _quantized(QUANTIZATION_TYPES[suffix], weight, name)
        else:
            loaded[name] = _int8(weight, scales[name + SCALE]) if name + SCALE in scales else weight
    return loaded


def load_trained(path: Path) -> dict[str, torch.Tensor]:
    """Load what `save_compact` wrote, in float32."""
    trained = {name: as_tensor(weight) for name, weight in load_compact(path).items()}
    return {name: weight.float() if weight.is_floating_point() else weight for name, weight in trained.items()}


def _int8(codes: torch.Tensor, scale: torch.Tensor) -> Quantized:
    return Quantized(INT8, torch.cat([scale[:, None].view(torch.uint8), codes.view(torch.uint8)], 1))


def save_named(path: Path, weights: Mapping[str, Weight]) -> None:
    """Write weights as they are, for `find_named`; names of quantized ones end with their type."""
    tensors = {_stored_name(name, weight): weight.data.contiguous() for name, weight in weights.items()}
    save_file(tensors, path, metadata={"format": "pt"})


def _stored_name(name: str, weight: Weight) -> str:
    return f"{name}.{weight.qtype.name}" if isinstance(weight, Quantized) else name


def find_named(tensors: Mapping[str, torch.Tensor], name: str) -> Weight | None:
    """Find a weight that `save_named` wrote; None if it is missing. Raises ValueError for invalid bytes."""
    for qtype in QUANTIZATION_TYPES.values():
        stored = f"{name}.{qtype.name}"
        if stored in tensors:
            return _quantized(qtype, tensors[stored], stored)
    return tensors.get(name)


def _quantized(qtype: QuantizationType, data: torch.Tensor, name: str) -> Quantized:
    if data.dtype != torch.uint8 or data.dim() != 2:
        actual = f"{str(data.dtype).removeprefix('torch.')} {list(data.shape)}"
        raise ValueError(f"tensor {name} is {actual}, not rows of bytes")
    columns = qtype.columns(data.shape[1])
    if columns < 1 or qtype.row_bytes(columns) != data.shape[1]:
        raise ValueError(f"tensor {name} has rows of {data.shape[1]} bytes, not whole {qtype.name} blocks")
    weight = Quantized(qtype, data)
    if not weight.is_finite():
        raise ValueError(f"tensor {name} has a scale that is infinite or NaN")
    return weight
