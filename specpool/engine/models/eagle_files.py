"""Reads the file with the tensors of an EAGLE head."""

from collections.abc import Mapping
from pathlib import Path
from pickle import UnpicklingError

import torch
from safetensors import safe_open
from safetensors.torch import load_file

from specpool.engine.config.sources import UnsupportedModelError, first_line

SAFETENSORS, PICKLED = "model.safetensors", "pytorch_model.bin"
FC, D2T, EAGLE3_LAYER, FIRST_LAYER = "fc.weight", "d2t", "midlayer.", "layers.0."
UNUSED = ("t2d", "rotary_emb.inv_freq")
"""Tensors that follow from others."""
FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def why_no_head(folder: Path) -> str | None:
    """Why a folder has no EAGLE head in a single file; None if it has one."""
    file = folder / SAFETENSORS
    if not file.is_file() and not any(folder.glob("*.safetensors")) and not any(folder.glob("*.gguf")):
        file = folder / PICKLED
    if not file.is_file():
        return f"it has neither {SAFETENSORS} nor {PICKLED}"
    try:
        names = _names(file)
    except Exception as error:  # the file may contain anything
        return f"{file} cannot be read: {first_line(error)}"
    if FC not in names or not any(name.startswith((EAGLE3_LAYER, FIRST_LAYER)) for name in names):
        return f"{file} has no {FC}, or no weights whose names begin with {EAGLE3_LAYER} or {FIRST_LAYER}"
    return None


def read_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """The tensors of a head by name. UnsupportedModelError: they cannot be read, or weights are no floats."""
    file = folder / SAFETENSORS
    file = file if file.is_file() else folder / PICKLED
    try:
        tensors = _read_pickled(file) if file.name == PICKLED else load_file(file)
    except Exception as error:  # the file may contain anything
        raise UnsupportedModelError(f"{file} cannot be read: {first_line(error)}") from error
    for name, tensor in tensors.items():
        if tensor.dtype not in FLOATS and name != D2T and not name.endswith(UNUSED):
            raise UnsupportedModelError(f"{file}: {name} has the type {tensor.dtype}, not one of {FLOATS}")
    return tensors


def _names(file: Path) -> set[str]:
    """Names of the tensors of a file."""
    if file.name == PICKLED:
        return set(_read_pickled(file))
    with safe_open(file, framework="pt") as tensors:
        return set(tensors.keys())


def _read_pickled(file: Path) -> dict[str, torch.Tensor]:
    """Tensors of a file that could contain code, none of which is run. ValueError, or another error of the library."""
    try:
        content: object = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    except UnpicklingError:  # its message advises to run the code
        raise ValueError("it is no pickle, or has objects that could run code") from None
    if not isinstance(content, Mapping):
        raise ValueError("it has no names of tensors")
    return {name: tensor for name, tensor in content.items() if isinstance(tensor, torch.Tensor)}
