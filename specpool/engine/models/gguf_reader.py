"""Reads the tensors of GGUF files. Errors name the file and the tensor."""

from collections import Counter
from pathlib import Path

import numpy as np
import torch
from gguf import GGML_QUANT_SIZES, dequantize

from specpool.engine.models.gguf_header import GgufError, GgufHeader
from specpool.engine.weights.quantization_types import QUANTIZATION_TYPES
from specpool.engine.weights.quantized import Quantized, Weight

ARCHITECTURE, PARTS = "general.architecture", "split.count"


class GgufFile:
    """A file with a valid header and all bytes of its tensors."""

    def __init__(self, path: Path) -> None:
        """Raise OSError or GgufError."""
        self.path = path
        if not path.stat().st_size:
            raise GgufError(f"{path} is not a GGUF file: it is empty")
        # Copy-on-write, because torch warns about read-only memory.
        self._bytes = np.memmap(path, dtype=np.uint8, mode="c")
        header = GgufHeader(self._bytes.data, path)
        self.metadata, self.tensors = header.metadata, header.tensors
        """Metadata: numbers and strings by key; None for arrays. Tensors: by name."""
        self.arrays, self.read_array = header.arrays, header.read_array
        self.architecture = str(self.metadata.get(ARCHITECTURE))
        parts = self.metadata.get(PARTS)
        if type(parts) is int and parts > 1:
            raise GgufError(
                f"{path} is one of {parts} parts of a model; join them with "
                f"llama-gguf-split --merge NAME-00001-of-{parts:05}.gguf JOINED.gguf"
            )

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
    def dequantized(self) -> Counter[str]:
        """Number of tensors by quantization type, for types that are not in QUANTIZATION_TYPES."""
        types = [tensor.qtype for tensor in self.tensors.values()]
        return Counter(
            qtype.name for qtype in types if GGML_QUANT_SIZES[qtype][0] > 1 and qtype.name not in QUANTIZATION_TYPES
        )
