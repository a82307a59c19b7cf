"""The trained weights of a draft as a small file: matrices in int8 with a scale for each row, norms in bfloat16."""

from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

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


def load_compact(path: Path) -> dict[str, torch.Tensor]:
    """The weights that `save_compact` wrote, in float32, but rounded to bfloat16: compiled passes can keep them so."""
    stored = load_file(path)
    scales = {name: stored.pop(name) for name in list(stored) if name.endswith(SCALE)}
    trained = {name: w * scales[name + SCALE][:, None] if name + SCALE in scales else w for name, w in stored.items()}
    return {name: w.bfloat16().float() if w.is_floating_point() else w for name, w in trained.items()}
