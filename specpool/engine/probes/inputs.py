"""Probe inputs: numbers whose rounded sum reveals the order in which they were added."""

import torch

from specpool.engine.weights.quantization_types import INT8, SCALE_BYTES, QuantizationType
from specpool.engine.weights.quantized import Quantized

# Random numbers take time, so a probed weight repeats after this many outputs.
DISTINCT_OUTPUTS = 1024


class ProbeInputs:
    """Random tensors with the device and dtype of a sample, the same in every process.

    When the terms of a sum cancel, only rounding errors remain, and another order of summation changes nearly every
    element. In an ordinary sum in half precision it changes one element in thousands.
    """

    def __init__(self, sample: torch.Tensor) -> None:
        self._sample = sample
        self._generator = torch.Generator().manual_seed(0)

    def normal(self, *shape: int) -> torch.Tensor:
        """Numbers of about the same magnitude."""
        return torch.randn(*shape, generator=self._generator).to(self._sample)

    def cancelling(self, count: int, *shape: int) -> torch.Tensor:
        """Numbers [count, *shape] of many magnitudes that sum to exactly zero over the first axis."""
        size = torch.exp2(torch.randint(-7, 8, (count // 2, *shape), generator=self._generator)).to(self._sample)
        half = self.normal(count // 2, *shape) * size
        return torch.cat([half, -half, torch.zeros(count % 2, *shape).to(half)])

    def gemm(self, outputs: int, inputs: int, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        """A weight [outputs, inputs], and rows [rows, inputs] whose dot products with it cancel."""
        order = self.order(inputs)
        half = self.normal(min(outputs, DISTINCT_OUTPUTS), inputs // 2)
        weight = torch.cat([half, half, torch.zeros(len(half), inputs % 2).to(half)], 1)[:, order]
        weight = weight.repeat(-(-outputs // len(half)), 1)[:outputs]
        return weight, self.cancelling(inputs, rows)[order].T.contiguous()

    def quantized(self, kind: QuantizationType, outputs: int, inputs: int) -> Quantized:
        """A weight of a quantized kind, with random codes and scales."""
        data = torch.randint(0, 256, (outputs, kind.row_bytes(inputs)), generator=self._generator, dtype=torch.uint8)
        if kind is INT8:
            data[:, :SCALE_BYTES] = self._magnitudes(outputs, 1).view(torch.uint8)
        for at in kind.float16_offsets:
            numbers = self._magnitudes(outputs, inputs // kind.block, 1).half().view(torch.uint8)
            data.unflatten(1, (-1, kind.block_bytes))[..., at : at + 2] = numbers
        return Quantized(kind, data)

    def order(self, count: int) -> torch.Tensor:
        """A random permutation of `count` indexes."""
        return torch.randperm(count, generator=self._generator).to(self._sample.device)

    def below(self, limit: int, *shape: int) -> torch.Tensor:
        """Random integers from 0 to `limit` - 1."""
        return torch.randint(0, limit, shape, generator=self._generator).to(self._sample.device)

    def _magnitudes(self, *shape: int) -> torch.Tensor:
        return torch.rand(*shape, generator=self._generator) * 2.0**-7 + 2.0**-10
