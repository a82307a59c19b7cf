"""Dequantizes the weights of quantized safetensors files as they are read."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import EllipsisType
from typing import Any

import torch
from safetensors import safe_open

from specpool.engine.config.sources import UnsupportedModelError
from specpool.engine.models.packed_formats import Numbers, PackedFormat, Parts
from specpool.engine.models.repacking import as_quantized
from specpool.engine.weights.quantized import Weight

# Name endings of activation scales and zero points. They are ignored: Specpool does not use them.
ACTIVATIONS = tuple(
    f"{part}_{kind}"
    for part in ("input", "output", "activation", ".q", ".k", ".v")
    for kind in ("scale", "zero_point", "global_scale")
)
STORED_TYPES = ("I8", "F8_E4M3")
"""Data types of quantized weights that are stored under the weight's own name."""


class PackedWeight:
    """A quantized weight that is dequantized to float32 when transformers reads it as `weight[...]`."""

    def __init__(self, name: str, packed: PackedFormat, parts: Mapping[str, Any]) -> None:
        """`parts`: slices of safetensors files, keyed by name ending."""
        self._name, self._packed, self._parts = name, packed, parts

    def __getitem__(self, index: EllipsisType) -> torch.Tensor:
        with self._naming():
            numbers = self._decode()
            return (numbers.dequantized() if isinstance(numbers, Numbers) else numbers).contiguous()

    def read(self) -> Weight:
        """Return the weight: quantized if a compiled pass can use it exactly, otherwise in float32."""
        with self._naming():
            numbers = self._decode()
            if not isinstance(numbers, Numbers):
                return numbers
            quantized = as_quantized(numbers)
            return numbers.dequantized().contiguous() if quantized is None else quantized

    def _decode(self) -> Numbers | torch.Tensor:
        parts = Parts({ending: part[...] for ending, part in self._parts.items()})
        for ending, part in parts.items():
            if not part.numel():
                raise ValueError(f"{ending} is empty")
            if "scale" in ending:
                _check_scales(ending, part, may_be_negative=self._packed.integers)
        return self._packed.decode(parts)

    @contextmanager
    def _naming(self) -> Iterator[None]:
        try:
            yield
        except (ValueError, RuntimeError, IndexError) as error:  # RuntimeError: mismatched shapes
            raise UnsupportedModelError(f"{self._name}: {error}") from error


def _check_scales(ending: str, scales: torch.Tensor, may_be_negative: bool) -> None:
    """Refuse scales that no quantizer writes. Some write 0 for blocks of zeros, or negative scales for integers."""
    numbers = (scales.view(torch.float8_e8m0fnu) if scales.dtype == torch.uint8 else scales).float()
    if not numbers.isfinite().all():
        raise ValueError(f"{ending} has NaN or infinite scales")
    if not numbers.any():
        raise ValueError(f"{ending} is zero")
    if not may_be_negative and bool((numbers < 0).any()):
        raise ValueError(f"{ending} has negative scales")


def packed_weights(files: Sequence[Path], packed: PackedFormat) -> dict[str, Any]:
    """Return all weights of a quantized checkpoint by name; read each as `weight[...]`. UnsupportedModelError."""
    opened = [safe_open(file, framework="pt") for file in files]
    tensors = {name: file.get_slice(name) for file in opened for name in file.keys()}  # noqa: SIM118
    weights: dict[str, Any] = {}
    parts: dict[str, dict[str, Any]] = {}
    for name, tensor in tensors.items():
        ending = next((ending for ending in packed.endings if name.endswith(ending)), None)
        if ending is not None:
            parts.setdefault(name.removesuffix(ending) + packed.suffix, {})[ending] = tensor
        elif not name.endswith(ACTIVATIONS):
            weights[name] = tensor
    for name, its_parts in parts.items():
        if name in weights:
            stored = weights[name].get_dtype()
            if stored not in STORED_TYPES:
                raise UnsupportedModelError(f"{name} has {min(its_parts)}, but is stored as {stored}")
            its_parts[packed.suffix] = weights[name]
        weights[name] = PackedWeight(name, packed, its_parts)
    for name, weight in weights.items():
        if not isinstance(weight, PackedWeight) and weight.get_dtype() in STORED_TYPES:
            raise UnsupportedModelError(f"{name} is stored as {weight.get_dtype()}, but has no scale")
    return weights
