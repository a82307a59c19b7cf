"""GEMMs of the compiled pass with random weights of any kind."""

from collections.abc import Sequence
from ctypes import CDLL, byref, c_int64, c_void_p

import torch

from specpool.engine.passes.native.decoder import Batch, Linear, Model
from specpool.engine.passes.native.model import ROUNDED_BYTES
from specpool.engine.passes.native.packed_weights import ALIGNMENT, PackedWeights
from specpool.engine.passes.native.panels import BFLOAT16, PANEL, PART, Segment
from specpool.engine.probes.inputs import ProbeInputs
from specpool.engine.weights.quantization_types import QUANTIZATION_TYPES, SCALE_BYTES
from specpool.engine.weights.quantized import Weight

NEVER = 1 << 20
INPUTS = 512


class Gemm:
    """A GEMM of the compiled pass."""

    def __init__(
        self, library: CDLL, segments: Sequence[Segment], bias: torch.Tensor | None = None, widened_from: int = NEVER
    ) -> None:
        self._library, self._outputs = library, sum(segment.weight.shape[0] for segment in segments)
        size = sum(segment.total_bytes + ALIGNMENT for segment in segments)
        self._packed = PackedWeights(size + 4 * (self._outputs + PANEL) + ALIGNMENT)
        self.linear: Linear = self._packed.linear(segments, bias, widened_from)

    def __call__(self, x: torch.Tensor, threads: int = 1) -> torch.Tensor:
        """Multiply rows [n, inputs]. Return [n, outputs]."""
        out = torch.full((len(x), self.linear.outputs), torch.nan)
        rounded = torch.empty(x.numel() // PART * ROUNDED_BYTES, dtype=torch.uint8)
        addresses = (c_void_p(tensor.data_ptr()) for tensor in (x, rounded, out))
        self._library.run_gemm(byref(self.linear), c_int64(len(x)), c_int64(threads), *addresses)
        return out[:, : self._outputs]

    def embed(self, outputs: torch.Tensor) -> torch.Tensor:
        """The weights [n, inputs] of some outputs, looked up like embeddings."""
        out = torch.full((len(outputs), self.linear.inputs), torch.nan)
        model = Model(embedding_scale=1, hidden=self.linear.inputs, embedding=self.linear)
        batch = Batch(rows=len(outputs), threads=1, token_ids=outputs.data_ptr())
        self._library.embed_stage(byref(model), byref(batch), c_void_p(out.data_ptr()))
        return out


def random_weight(kind: str, outputs: int, inputs: int = INPUTS) -> Weight:
    """A weight with scales of both signs, some of them subnormal in float16."""
    numbers = ProbeInputs(torch.empty(0))
    if kind not in QUANTIZATION_TYPES:
        weight = numbers.normal(outputs, inputs)
        return weight.bfloat16().float() if kind == BFLOAT16 else weight
    weight = numbers.quantized(QUANTIZATION_TYPES[kind], outputs, inputs)
    if kind == "INT8":
        weight.data[::3, SCALE_BYTES - 1] |= 0x80
        return weight
    for at in QUANTIZATION_TYPES[kind].float16_offsets:
        blocks = weight.data.unflatten(1, (-1, QUANTIZATION_TYPES[kind].block_bytes))
        blocks[::3, :, at + 1] |= 0x80
        blocks[1::4, :, at + 1] &= 0x83
    return weight


def random_rows(count: int, inputs: int = INPUTS) -> torch.Tensor:
    """Rows whose dot products reveal the order of summation."""
    return ProbeInputs(torch.empty(0)).cancelling(inputs, count).T.contiguous()
