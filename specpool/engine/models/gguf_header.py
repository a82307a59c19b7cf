"""Reads the headers of GGUF files within limits, so that a hostile file is refused before other libraries parse it.

Source: the specification in ggml's docs/gguf.md. The reader in the PyPI package `gguf` takes seconds, because it builds
an array for each string of a vocabulary; this one reads arrays only on request.
"""

import math
import struct
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Any

from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

from specpool.engine.config.sources import GGUF_MAGIC
from specpool.engine.numerics.tiles import round_up

VERSIONS = (2, 3)
ALIGNMENT = 32
ALIGNED = "general.alignment"
MAX_HEADER_BYTES = 2**26
MAX_TENSORS, MAX_PAIRS, MAX_DIMENSIONS = 2**16, 2**14, 4
MAX_ELEMENTS, MAX_NESTED = 2**21, 4
"""Maximum number of elements of all arrays, and of arrays within each other. Vocabularies have up to 1.4 million."""
MAX_ELEMENT_BYTES = 2**12
"""Maximum length of a string in an array, such as a token."""
# Struct formats of metadata values by type number.
SIMPLE = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
STRING, ARRAY = 8, 9
# Minimum bytes of a tensor, a pair, and an array's element that is a string or an array.
TENSOR_BYTES, PAIR_BYTES, ELEMENT_BYTES = 24, 13, 8


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


@dataclass(frozen=True)
class Array:
    """The location of an array's elements."""

    element: int  # type number
    count: int
    offset: int  # bytes from the beginning of the file


class GgufHeader:
    """Metadata and tensors of a file that has all bytes of its tensors."""

    def __init__(self, data: memoryview, path: Path) -> None:
        """Raise GgufError."""
        self._bytes, self._path, self._at, self.elements = data, path, 0, 0
        self.metadata: dict[str, Any] = {}
        """Numbers and strings by key; None for arrays."""
        self.arrays: dict[str, Array] = {}
        self.tensors: dict[str, Tensor] = {}
        try:
            self._read()
        except struct.error as error:
            raise GgufError(f"{path} is not a complete GGUF file: it ends within its header") from error
        except UnicodeDecodeError as error:
            raise GgufError(f"{path} is damaged: its header has a string that is not UTF-8") from error

    def read_array(self, key: str) -> list[Any]:
        """Return the elements of an array of numbers or strings. Raises GgufError for other values."""
        if (array := self.arrays.get(key)) is None or array.element == ARRAY:
            raise self._damaged(f"its {key} is not an array of numbers or strings")
        if array.element in SIMPLE:
            return list(struct.unpack_from(f"<{array.count}{SIMPLE[array.element][1]}", self._bytes, array.offset))
        self._at = array.offset
        try:
            return [self._string() for _ in range(array.count)]
        except UnicodeDecodeError:
            raise self._damaged(f"its {key} has a string that is not UTF-8") from None

    def _read(self) -> None:
        if bytes(self._bytes[: len(GGUF_MAGIC)]) != GGUF_MAGIC:
            raise GgufError(f"{self._path} is not a GGUF file")
        self._at = len(GGUF_MAGIC)
        version = self._number("<I")
        if version not in VERSIONS:
            raise GgufError(f"{self._path} is a GGUF file of version {version}; versions 2 and 3 are supported")
        tensors, pairs = self._number("<Q"), self._number("<Q")
        self._check_count("tensors", tensors, MAX_TENSORS, TENSOR_BYTES)
        self._check_count("key-value pairs", pairs, MAX_PAIRS, PAIR_BYTES)
        for _ in range(pairs):
            self._read_pair()
        infos = [self._tensor_info() for _ in range(tensors)]
        begin = round_up(self._at, self._alignment())
        for name, shape, number, offset in infos:
            if name in self.tensors:
                raise self._damaged(f"it has two tensors {name}")
            self.tensors[name] = self._check_tensor(name, shape, number, begin + offset)
        for one, other in pairwise(sorted(self.tensors.values(), key=lambda tensor: tensor.offset)):
            if one.offset + one.size > other.offset:
                raise self._damaged(f"its tensors {one.name} and {other.name} overlap")

    def _alignment(self) -> int:
        alignment = self.metadata.get(ALIGNED, ALIGNMENT)
        if type(alignment) is not int or alignment < 1 or alignment.bit_count() != 1:
            raise self._damaged(f"its {ALIGNED} is {alignment!r}, not a power of two")
        return alignment

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

    def _read_pair(self) -> None:
        key = self._string()
        if key in self.metadata:  # readers disagree on which one counts
            raise self._damaged(f"its metadata has {key} twice")
        kind = self._number("<I")
        value: Any = None
        if kind in SIMPLE:
            value = self._number(SIMPLE[kind])
        elif kind == STRING:
            value = self._string()
        else:
            self._skip_value(key, kind)
        if isinstance(value, float) and not math.isfinite(value):
            raise self._damaged(f"its {key} is {value}")
        self.metadata[key] = value

    def _skip_value(self, key: str, kind: int, depth: int = 0) -> None:
        """Skip an array or an element of one."""
        if kind == STRING:
            length = self._number("<Q")
            if length > MAX_ELEMENT_BYTES:
                raise self._damaged(f"its {key} has a string of {length:,} bytes; the maximum is {MAX_ELEMENT_BYTES:,}")
            self._skip(length)
            return
        if kind != ARRAY:
            raise self._damaged(f"its {key} has a value of type {kind}")
        if depth == MAX_NESTED:
            raise self._damaged(f"its {key} nests arrays more than {MAX_NESTED} deep")
        element, count = self._number("<I"), self._number("<Q")
        self.elements += count
        if not depth:
            self.arrays[key] = Array(element, count, self._at)
        size = struct.calcsize(SIMPLE[element]) if element in SIMPLE else ELEMENT_BYTES
        self._check_count(f"array elements up to {key}", self.elements, MAX_ELEMENTS, 0)
        self._check_count(f"elements in {key}", count, MAX_ELEMENTS, size)
        if element in SIMPLE:
            self._skip(count * size)
            return
        for _ in range(count):
            self._skip_value(key, element, depth + 1)

    def _check_count(self, what: str, count: int, maximum: int, size: int) -> None:
        """Refuse too many elements, or more than fit into the rest of the file with `size` bytes each."""
        if count > maximum:
            raise self._damaged(f"its header has {count:,} {what}; the maximum is {maximum:,}")
        rest = len(self._bytes) - self._at
        if count * size > rest:
            raise self._damaged(f"its header has {count:,} {what}, but only {rest:,} bytes follow")

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
        if self._at > MAX_HEADER_BYTES:
            raise self._damaged(f"its header has more than {MAX_HEADER_BYTES:,} bytes")
        return begin

    def _damaged(self, reason: str) -> GgufError:
        return GgufError(f"{self._path} is damaged: {reason}")
