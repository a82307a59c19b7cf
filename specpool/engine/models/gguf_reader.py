"""Reads the tensors of GGUF files, which may be split into parts. Errors name the file and the tensor."""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGML_QUANT_SIZES, dequantize

from specpool.engine.config.sources import GGUF_PART
from specpool.engine.models.gguf_header import GgufError, GgufHeader, Tensor
from specpool.engine.weights.quantization_types import QUANTIZATION_TYPES
from specpool.engine.weights.quantized import Quantized, Weight

ARCHITECTURE = "general.architecture"
SPLIT = "split."
PARTS, PART, PARTS_TENSORS = "split.count", "split.no", "split.tensors.count"
MAX_PARTS = 2**10
FEW_ELEMENTS, ELEMENTS_PER_ROW = 2**16, 8
"""Maximum number of array elements: without tensors, and per row of the largest tensor."""


class GgufPart:
    """One file with a valid header and all bytes of its tensors."""

    def __init__(self, path: Path) -> None:
        """Raise OSError or GgufError."""
        self.path = path
        if not path.stat().st_size:
            raise GgufError(f"{path} is not a GGUF file: it is empty")
        # Copy-on-write, because torch warns about read-only memory.
        self._bytes = np.memmap(path, dtype=np.uint8, mode="c")
        self.header = GgufHeader(self._bytes.data, path)

    def rows(self, tensor: Tensor) -> np.ndarray:
        """Return a tensor's bytes [rows, bytes per row]."""
        rows: np.ndarray = self._bytes[tensor.offset : tensor.offset + tensor.size].reshape(-1, tensor.row_bytes)
        return rows


class GgufFile:
    """A file, or all parts of a split file, with valid headers and all bytes of their tensors."""

    def __init__(self, path: Path) -> None:
        """Open a file, or all parts of a split file given any part. Raises OSError or GgufError."""
        given = GgufPart(path)
        count = given.header.metadata.get(PARTS, 1)
        parts = [given] if count in (0, 1) and type(count) is int else _all_parts(given, count)
        first = parts[0].header
        self.path = parts[0].path
        self.metadata, self.arrays, self.read_array = first.metadata, first.arrays, first.read_array
        """Metadata: numbers and strings by key; None for arrays. A split file has it in its first part."""
        self.tensors: dict[str, Tensor] = {}
        self._parts: dict[str, GgufPart] = {}
        for part in parts:
            for key, value in part.header.metadata.items():
                if not key.startswith(SPLIT) and (key not in self.metadata or self.metadata[key] != value):
                    raise GgufError(f"{part.path}: key {key} is missing from {self.path.name} or differs there")
            for name, tensor in part.header.tensors.items():
                if name in self.tensors:
                    raise GgufError(f"{part.path}: tensor {name} is also in {self._parts[name].path.name}")
                self.tensors[name], self._parts[name] = tensor, part
        self.architecture = str(self.metadata.get(ARCHITECTURE))
        stated = first.metadata.get(PARTS_TENSORS, len(self.tensors)) if len(parts) > 1 else len(self.tensors)
        if stated != len(self.tensors):
            raise GgufError(f"{self.path}: {PARTS_TENSORS} is {stated}, but its parts have {len(self.tensors)} tensors")
        elements = sum(part.header.elements for part in parts)
        rows = max((max(tensor.shape) for tensor in self.tensors.values()), default=0)
        if elements > FEW_ELEMENTS + ELEMENTS_PER_ROW * rows:
            raise GgufError(
                f"{self.path} is damaged: its arrays have {elements:,} elements, too many for tensors of {rows:,} rows"
            )

    def read(self, name: str) -> Weight:
        """Read a tensor: quantized if its type is one of QUANTIZATION_TYPES, else float32.

        Quantized experts have two dimensions: the rows of each expert in turn.
        Raises GgufError if its type is not supported or a scale is not finite.
        """
        tensor = self.tensors[name]
        if tensor.qtype.name in QUANTIZATION_TYPES and len(tensor.shape) > 1:
            weight = Quantized(QUANTIZATION_TYPES[tensor.qtype.name], torch.from_numpy(self._parts[name].rows(tensor)))
            if not weight.is_finite():
                raise self._not_finite(name)
            return weight
        return self._dequantized(name, self._parts[name].rows(tensor)).view(tensor.shape)

    def slices(self, name: str) -> Iterator[torch.Tensor]:
        """Read a tensor in slices of its first dimension, in float32. Raises GgufError like `read`."""
        tensor = self.tensors[name]
        for rows in np.split(self._parts[name].rows(tensor), tensor.shape[0]):
            yield self._dequantized(name, rows).view(tensor.shape[1:])

    def check_types(self) -> None:
        """Raise GgufError if a tensor has an unsupported type, before any tensor is read."""
        firsts = {tensor.qtype: name for name, tensor in reversed(self.tensors.items())}
        for name in firsts.values():
            self._dequantized(name, self._parts[name].rows(self.tensors[name])[:1])

    def _dequantized(self, name: str, rows: np.ndarray) -> torch.Tensor:
        qtype = self.tensors[name].qtype
        try:
            numbers = torch.from_numpy(np.array(dequantize(rows, qtype), np.float32))
        except NotImplementedError as error:
            path = self._parts[name].path
            raise GgufError(f"{path}: tensor {name} has the unsupported type {qtype.name}") from error
        if GGML_QUANT_SIZES[qtype][0] > 1 and not numbers.isfinite().all():
            raise self._not_finite(name)
        return numbers

    def _not_finite(self, name: str) -> GgufError:
        return GgufError(f"{self._parts[name].path}: tensor {name} has a scale that is infinite or NaN")

    @property
    def is_quantized(self) -> bool:
        return any(GGML_QUANT_SIZES[tensor.qtype][0] > 1 for tensor in self.tensors.values())

    @property
    def dequantized(self) -> Counter[str]:
        """Number of tensors by quantization type, for types that are not in QUANTIZATION_TYPES."""
        types = [tensor.qtype for tensor in self.tensors.values()]
        return Counter(
            qtype.name for qtype in types if GGML_QUANT_SIZES[qtype][0] > 1 and qtype.name not in QUANTIZATION_TYPES
        )


def _all_parts(given: GgufPart, count: Any) -> list[GgufPart]:
    """Return all parts of a split file in order. Raises GgufError."""
    path, named = given.path, GGUF_PART.fullmatch(given.path.name)
    if type(count) is not int or not 1 < count <= MAX_PARTS:
        raise GgufError(f"{path}: {PARTS} is {count!r}; it must be a whole number up to {MAX_PARTS:,}")
    if named is None:
        raise GgufError(f"{path} is one of {count} parts of a model; name it NAME-00001-of-{count:05}.gguf")
    parts = []
    for number in range(count):
        other = path.with_name(f"{named[1]}-{number + 1:05}-of-{count:05}.gguf")
        if not other.is_file():
            raise GgufError(f"{path} is one of {count} parts of a model, but {other.name} is missing")
        part = given if other == path else GgufPart(other)
        for key, expected in ((PARTS, count), (PART, number)):
            if (value := part.header.metadata.get(key)) != expected:
                raise GgufError(f"{other}: {key} is {value!r}, not {expected}")
        parts.append(part)
    if given not in parts:
        raise GgufError(f"{path}: {PARTS} is {count}, which does not match its name")
    return parts
