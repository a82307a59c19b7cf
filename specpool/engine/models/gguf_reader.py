"""Reads the header and tensors of GGUF files. Errors name the file and the tensor.

Source: the specification in ggml's docs/gguf.md. The reader in the PyPI package `gguf` takes seconds, because it builds
an array for each string of a vocabulary; this one skips them.
"""

import struct
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, dequantize

from specpool.engine.config.sources import GGUF_MAGIC
from specpool.engine.numerics.tiles import round_up
from specpool.engine.weights.quantization_types import QUANTIZATION_TYPES
from specpool.engine.weights.quantized import Quantized, Weight

VERSIONS = (2, 3)
ALIGNMENT = 32
MAX_DIMENSIONS = 4
ARCHITECTURE, ALIGNED, PARTS = "general.architecture", "general.alignment", "split.count"
# Struct formats of metadata values by type number.
SIMPLE = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
STRING, ARRAY = 8, 9


class GgufError(ValueError):
    """The file cannot be read; the message says why."""


@dataclass(frozen=True)
class Tensor:
    """A tensor's type, shape and place in the file."""

    name: str
    qtype: GGMLQuantizationType
    shape: tuple[int, ...]  # in torch's order: the last dimension is contiguous
    offset: int  # bytes from the beginning of the file
    row_bytes: int

    @property
    def size(self) -> int:
        return prod(self.shape[:-1]) * self.row_bytes


class GgufFile:
    """A file with a valid header and all bytes of its tensors."""

    def __init__(self, path: Path) -> None:
        """Raise OSError or GgufError."""
        self.path = path
        if not path.stat().st_size:
            raise GgufError(f"{path} is not a GGUF file: it is empty")
        # Copy-on-write, because torch warns about read-only memory.
        self._bytes = np.memmap(path, dtype=np.uint8, mode="c")
        header = _Header(self._bytes.data, path)
        self.metadata, self.tensors = header.read()
        """Metadata: numbers and strings by key; None for arrays. Tensors: by name."""
        self.architecture = str(self.metadata.get(ARCHITECTURE))
        parts = self.metadata.get(PARTS)
        if type(parts) is int and parts > 1:
            raise GgufError(f"{path} is one of {parts} parts of a model; join them with llama-gguf-split --merge")

    def read(self, name: str) -> Weight:
        """Read a tensor: quantized if its type is one of QUANTIZATION_TYPES, else float32.

        Raises GgufError if its type is not supported or a scale is not finite.
        """
        tensor = self.tensors[name]
        data = self._bytes[tensor.offset : tensor.offset + tensor.size].reshape(-1, tensor.row_bytes)
        if tensor.qtype.name in QUANTIZATION_TYPES and len(tensor.shape) == 2:
            weight = Quantized(QUANTIZATION_TYPES[tensor.qtype.name], torch.from_numpy(data))
            if not weight.is_finite():
                raise GgufError(f"{self.path}: tensor {name} has a scale that is infinite or NaN")
            return weight
        try:
            numbers = dequantize(data, tensor.qtype)
        except NotImplementedError as error:
            raise GgufError(f"{self.path}: tensor {name} has the unsupported type {tensor.qtype.name}") from error
        return torch.from_numpy(np.array(numbers, np.float32)).view(tensor.shape)

    @property
    def dequantized(self) -> Mapping[str, int]:
        """Number of tensors by quantization type, for types that are not in QUANTIZATION_TYPES."""
        types = [tensor.qtype for tensor in self.tensors.values()]
        return Counter(
            qtype.name for qtype in types if GGML_QUANT_SIZES[qtype][0] > 1 and qtype.name not in QUANTIZATION_TYPES
        )


class _Header:
    def __init__(self, data: memoryview, path: Path) -> None:
        self._bytes, self._path, self._at = data, path, 0

    def read(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        if bytes(self._bytes[:4]) != GGUF_MAGIC:
            raise GgufError(f"{self._path} is not a GGUF file")
        self._at = len(GGUF_MAGIC)
        try:
            version = self._number("<I")
            if version not in VERSIONS:
                raise GgufError(f"{self._path} is a GGUF file of version {version}; versions 2 and 3 are supported")
            tensor_count, value_count = self._number("<Q"), self._number("<Q")
            metadata = dict(self._pair() for _ in range(value_count))
            infos = [self._tensor_info() for _ in range(tensor_count)]
        except struct.error as error:
            raise GgufError(f"{self._path} is not a complete GGUF file: it ends within its header") from error
        except UnicodeDecodeError as error:
            raise GgufError(f"{self._path} is damaged: its header has a string that is not UTF-8") from error
        except RecursionError:
            raise GgufError(f"{self._path} is damaged: its metadata nests arrays too deeply") from None
        alignment = metadata.get(ALIGNED, ALIGNMENT)
        if type(alignment) is not int or alignment.bit_count() != 1:
            raise GgufError(f"{self._path} is damaged: its {ALIGNED} is {alignment!r}, not a power of two")
        begin = round_up(self._at, alignment)
        tensors: dict[str, Tensor] = {}
        for name, shape, number, offset in infos:
            if name in tensors:
                raise GgufError(f"{self._path} is damaged: it has two tensors {name}")
            tensors[name] = self._check_tensor(name, shape, number, begin + offset)
        return metadata, tensors

    def _check_tensor(self, name: str, shape: tuple[int, ...], number: int, offset: int) -> Tensor:
        prefix = f"{self._path}: tensor {name}"
        try:
            qtype = GGMLQuantizationType(number)
        except ValueError:
            raise GgufError(f"{prefix} has the unknown type {number}") from None
        if 0 in shape:
            raise GgufError(f"{prefix} has a dimension of 0")
        block, block_bytes = GGML_QUANT_SIZES[qtype]
        if shape[-1] % block:
            raise GgufError(f"{prefix} has rows of {shape[-1]} weights, not whole {qtype.name} blocks of {block}")
        tensor = Tensor(name, qtype, shape, offset, shape[-1] // block * block_bytes)
        missing = tensor.offset + tensor.size - len(self._bytes)
        if missing > 0:
            raise GgufError(f"{prefix} is truncated: {missing:,} of {tensor.size:,} bytes are missing")
        return tensor

    def _tensor_info(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self._string()
        dimensions = self._number("<I")
        if dimensions > MAX_DIMENSIONS:
            raise GgufError(f"{self._path}: tensor {name} has {dimensions} dimensions; the maximum is {MAX_DIMENSIONS}")
        shape = tuple(self._number("<Q") for _ in range(dimensions))
        return name, shape[::-1] or (1,), self._number("<I"), self._number("<Q")

    def _pair(self) -> tuple[str, Any]:
        key = self._string()
        return key, self._value(self._number("<I"))

    def _value(self, value_type: int) -> Any:
        """Read a value; arrays are skipped and give None."""
        if value_type in SIMPLE:
            return self._number(SIMPLE[value_type])
        if value_type == STRING:
            return self._string()
        if value_type != ARRAY:
            raise GgufError(f"{self._path} is damaged: its metadata has a value of type {value_type}")
        element, count = self._number("<I"), self._number("<Q")
        if element in SIMPLE:
            self._skip(count * struct.calcsize(SIMPLE[element]))
        elif element == STRING:
            for _ in range(count):
                self._skip(self._number("<Q"))
        else:
            for _ in range(count):
                self._value(element)
        return None

    def _string(self) -> str:
        begin = self._skip(self._number("<Q"))
        return bytes(self._bytes[begin : self._at]).decode()

    def _number(self, form: str) -> Any:
        begin = self._skip(struct.calcsize(form))
        (number,) = struct.unpack_from(form, self._bytes, begin)
        return number

    def _skip(self, count: int) -> int:
        """Skip bytes and return where they began. Raises struct.error if the file ends before them."""
        begin = self._at
        self._at += count
        if self._at > len(self._bytes):
            raise struct.error
        return begin
