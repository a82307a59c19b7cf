"""Reads GGUF files: which tensors they have, and a tensor's bytes. Errors name the file, and the tensor if it is one's.

Source: the specification in ggml's docs/gguf.md. The reader of the PyPI package `gguf` builds an array for each of the
hundred thousand strings of a vocabulary, which takes seconds; here they are skipped.
"""

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, dequantize

from specpool.engine.weights.kinds import KINDS
from specpool.engine.weights.quantized import Quantized, Weight

MAGIC, VERSIONS = b"GGUF", (2, 3)
ALIGNMENT = 32
DIMENSIONS = 4
"""That a tensor of ggml can have."""
ARCHITECTURE, ALIGNED, PARTS = "general.architecture", "general.alignment", "split.count"
# Types of the values of metadata, by their numbers in the file.
SIMPLE = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
STRING, ARRAY = 8, 9


class GgufError(ValueError):
    """The file cannot be read; the message says what is wrong, and with which tensor."""


@dataclass(frozen=True)
class Stored:
    """Where a tensor is."""

    name: str
    kind: GGMLQuantizationType
    shape: tuple[int, ...]
    """As torch has it: the dimension of neighbouring weights is the last one."""
    offset: int
    """In bytes, from the beginning of the file."""
    row_bytes: int

    @property
    def size(self) -> int:
        """In bytes."""
        return prod(self.shape[:-1]) * self.row_bytes


class GgufFile:
    """A file whose header is sound, and which has all bytes of its tensors."""

    def __init__(self, path: Path) -> None:
        """OSError; GgufError."""
        self.path = path
        if not path.stat().st_size:
            raise GgufError(f"{path} is not a GGUF file: it is empty")
        # Copied on write, since torch warns of memory that cannot be written.
        self._bytes = np.memmap(path, dtype=np.uint8, mode="c")
        header = _Header(self._bytes.data, path)
        self.metadata, self.tensors = header.read()
        """By key, its numbers and texts; None for an array."""
        self.architecture = str(self.metadata.get(ARCHITECTURE))
        parts = self.metadata.get(PARTS)
        if type(parts) is int and parts > 1:
            raise GgufError(
                f"{path} is one of {parts} parts of a model; llama.cpp's llama-gguf-split --merge joins them"
            )

    def read(self, name: str) -> Weight:
        """A tensor: `Quantized` if its type is one of KINDS, else in float32.

        GgufError if its type cannot be unpacked, or if a block's scale is no finite number.
        """
        its = self.tensors[name]
        data = self._bytes[its.offset : its.offset + its.size].reshape(-1, its.row_bytes)
        if its.kind.name in KINDS and len(its.shape) == 2:
            weight = Quantized(KINDS[its.kind.name], torch.from_numpy(data))
            if not weight.is_finite():
                raise GgufError(f"{self.path}: tensor {name} has a block whose scale is infinite or not a number")
            return weight
        try:
            numbers = dequantize(data, its.kind)
        except NotImplementedError as error:
            raise GgufError(f"{self.path}: tensor {name} has the type {its.kind.name}, which is not read") from error
        return torch.from_numpy(np.array(numbers, np.float32)).view(its.shape)

    @cached_property
    def unpacked_kinds(self) -> Mapping[str, int]:
        """Types of quantized tensors that cannot be kept as they are, and how many tensors have them."""
        counts: dict[str, int] = {}
        for its in self.tensors.values():
            if GGML_QUANT_SIZES[its.kind][0] > 1 and its.kind.name not in KINDS:
                counts[its.kind.name] = counts.get(its.kind.name, 0) + 1
        return counts


class _Header:
    """Reads a file from its beginning."""

    def __init__(self, data: memoryview, path: Path) -> None:
        self._bytes, self._path, self._at = data, path, 0

    def read(self) -> tuple[dict[str, Any], dict[str, Stored]]:
        """The metadata by key, and the tensors by name."""
        if bytes(self._bytes[:4]) != MAGIC:
            raise GgufError(f"{self._path} is not a GGUF file")
        self._at = len(MAGIC)
        try:
            version = self._number("<I")
            if version not in VERSIONS:
                raise GgufError(f"{self._path} is a GGUF file of version {version}; versions 2 and 3 are read")
            tensors, values = self._number("<Q"), self._number("<Q")
            metadata = dict(self._pair() for _ in range(values))
            described = [self._tensor() for _ in range(tensors)]
        except struct.error as error:
            raise GgufError(f"{self._path} is not a whole GGUF file: it ends within its header") from error
        except UnicodeDecodeError as error:
            raise GgufError(f"{self._path} is damaged: its header has a text that is not UTF-8") from error
        except RecursionError:
            raise GgufError(f"{self._path} is damaged: its metadata has too many arrays in arrays") from None
        alignment = metadata.get(ALIGNED, ALIGNMENT)
        if type(alignment) is not int or alignment.bit_count() != 1:
            raise GgufError(f"{self._path} is damaged: its {ALIGNED} is {alignment!r}, no power of two")
        begin = -(-self._at // alignment) * alignment
        stored: dict[str, Stored] = {}
        for its in described:
            if its[0] in stored:
                raise GgufError(f"{self._path} is damaged: it has two tensors {its[0]}")
            stored[its[0]] = self._stored(*its, begin)
        return metadata, stored

    def _stored(self, name: str, shape: tuple[int, ...], number: int, offset: int, begin: int) -> Stored:
        tensor = f"{self._path}: tensor {name}"
        try:
            kind = GGMLQuantizationType(number)
        except ValueError:
            raise GgufError(f"{tensor} has the type {number}, which is not known") from None
        if 0 in shape:
            raise GgufError(f"{tensor} has a dimension of 0")
        block, block_bytes = GGML_QUANT_SIZES[kind]
        if shape[-1] % block:
            raise GgufError(
                f"{tensor} has rows of {shape[-1]} weights, no multiple of the {block} in a block of {kind.name}"
            )
        found = Stored(name, kind, shape, begin + offset, shape[-1] // block * block_bytes)
        missing = found.offset + found.size - len(self._bytes)
        if missing > 0:
            raise GgufError(f"{tensor} is cut off: the file lacks {missing:,} of its {found.size:,} bytes")
        return found

    def _tensor(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self._string()
        dimensions = self._number("<I")
        if dimensions > DIMENSIONS:
            raise GgufError(f"{self._path}: tensor {name} has {dimensions} dimensions; at most {DIMENSIONS} are read")
        shape = tuple(self._number("<Q") for _ in range(dimensions))
        return name, shape[::-1] or (1,), self._number("<I"), self._number("<Q")

    def _pair(self) -> tuple[str, Any]:
        key = self._string()
        return key, self._value(self._number("<I"))

    def _value(self, kind: int) -> Any:
        """A value, or None for an array, which is skipped."""
        if kind in SIMPLE:
            return self._number(SIMPLE[kind])
        if kind == STRING:
            return self._string()
        if kind != ARRAY:
            raise GgufError(f"{self._path} is damaged: its metadata has a value of type {kind}")
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
        """Where these bytes begin. struct.error if the file ends before them."""
        begin = self._at
        self._at += count
        if self._at > len(self._bytes):
            raise struct.error
        return begin
