"""The trained weights of a draft: in the file that is shipped, and in those that a draft worker reads.

All have matrices in int8 with a scale for each row, and norms in bfloat16.
"""

from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from specpool.engine.weights.kinds import INT8, KINDS, Kind
from specpool.engine.weights.quantized import Quantized, Weight, as_tensor

LARGEST = 127
SCALE = ".scale"


def save_compact(path: Path, trained: dict[str, torch.Tensor]) -> None:
    """Writes matrices [rows, columns] rounded to steps of their row's scale, and other floats in bfloat16."""
    stored = {}
    for name, weight in trained.items():
        if weight.is_floating_point() and weight.dim() == 2:
            # At least the smallest normal number, so that a row of zeros has a scale too.
            scale = (weight.float().abs().amax(1) / LARGEST).clamp_min(torch.finfo(torch.float32).tiny)
            stored[name], stored[name + SCALE] = (weight / scale[:, None]).round().to(torch.int8), scale
        else:
            stored[name] = weight.bfloat16() if weight.is_floating_point() else weight
    save_file({name: weight.contiguous() for name, weight in stored.items()}, path)


def load_compact(path: Path) -> dict[str, Weight]:
    """The weights that `save_compact` wrote, with matrices in the bits of the file."""
    stored = load_file(path)
    scales = {name: stored.pop(name) for name in list(stored) if name.endswith(SCALE)}
    return {
        name: _coded(weight, scales[name + SCALE]) if name + SCALE in scales else weight
        for name, weight in stored.items()
    }


def load_trained(path: Path) -> dict[str, torch.Tensor]:
    """The same weights in float32."""
    trained = {name: as_tensor(weight) for name, weight in load_compact(path).items()}
    return {name: weight.float() if weight.is_floating_point() else weight for name, weight in trained.items()}


def _coded(codes: torch.Tensor, scale: torch.Tensor) -> Quantized:
    return Quantized(INT8, torch.cat([scale[:, None].view(torch.uint8), codes.view(torch.uint8)], 1))


def save_named(path: Path, weights: Mapping[str, Weight]) -> None:
    """Writes weights for `find_named`: the name of a tensor of bytes ends with its kind."""
    tensors = {
        f"{name}.{weight.kind.name}" if isinstance(weight, Quantized) else name: weight.data.contiguous()
        for name, weight in weights.items()
    }
    save_file(tensors, path, metadata={"format": "pt"})


def find_named(tensors: Mapping[str, torch.Tensor], name: str) -> Weight | None:
    """A weight that `save_named` has written; None if it is not there. ValueError for bytes that are no such weight."""
    for kind in KINDS.values():
        stored = f"{name}.{kind.name}"
        if stored in tensors:
            return _of_kind(kind, tensors[stored], stored)
    return tensors.get(name)


def _of_kind(kind: Kind, data: torch.Tensor, name: str) -> Quantized:
    if data.dtype != torch.uint8 or data.dim() != 2:
        found = f"{str(data.dtype).removeprefix('torch.')} {list(data.shape)}"
        raise ValueError(f"tensor {name} is {found}, not rows of bytes")
    columns = kind.columns(data.shape[1])
    if columns < 1 or kind.row_bytes(columns) != data.shape[1]:
        raise ValueError(f"tensor {name} has rows of {data.shape[1]} bytes, which are no whole blocks of {kind.name}")
    weight = Quantized(kind, data)
    if not weight.is_finite():
        raise ValueError(f"tensor {name} has a scale that is infinite or not a number")
    return weight
