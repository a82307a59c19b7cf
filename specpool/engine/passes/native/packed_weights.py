"""The weights of a compiled pass, packed into panels in one tensor."""

from collections import Counter
from collections.abc import Mapping, Sequence
from ctypes import Array
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import pad

from specpool.engine.cache.memory import zeros
from specpool.engine.numerics.tiles import round_up
from specpool.engine.passes.fused import FusedModel
from specpool.engine.passes.native.panels import KIND_NUMBERS, PANEL, Segment, segments_of
from specpool.engine.passes.native.structs import LINEARS, NORMS, Linear, Panel
from specpool.engine.weights.quantized import parts_of, shares_memory

ALIGNMENT = 128
"""Bytes: two cache lines, which processors fetch together."""


@dataclass(frozen=True)
class ModelPanels:
    """The panels of all linear layers of a model, before they are packed."""

    layers: list[Mapping[str, Sequence[Segment]]]
    head: Sequence[Segment]
    embedding: Sequence[Segment] | None
    """None if tied to the head."""
    fc: Sequence[Segment] = ()
    projection: Sequence[Segment] = ()
    """The input of a feature draft."""

    @property
    def segments(self) -> list[Segment]:
        """All segments, each once."""
        linears = [linear for layer in self.layers for linear in layer.values()]
        ends = (self.head, self.embedding or (), self.fc, self.projection)
        return [segment for linear in (*linears, *ends) for segment in linear]

    @property
    def kinds(self) -> Counter[str]:
        """Bytes of weights by kind."""
        kinds = Counter[str]()
        for segment in self.segments:
            kinds[segment.kind] += segment.total_bytes
        return kinds


def panels_of(fused: FusedModel) -> ModelPanels:
    """The panels of a model, with weights as stored or in the smaller dtype that holds them exactly."""
    layers: list[Any] = list(fused.layers)
    tied = shares_memory(fused.embedding, fused.head)
    return ModelPanels(
        [{name: segments_of(parts_of(getattr(layer, name))) for name in LINEARS} for layer in layers],
        segments_of(parts_of(fused.head)),
        None if tied else segments_of([fused.embedding]),
        *(() if layer is None else segments_of(parts_of(layer)) for layer in (fused.fc, fused.projection)),
    )


class PackedWeights:
    """Panels and numbers in one tensor, to use large pages. Separate tensors made a step up to a fifth slower."""

    def __init__(self, size: int) -> None:
        """`size`: bytes of everything to pack, from `bytes_of`."""
        # Over-allocate: the kernels read 3 bytes past the end, and the memory may need alignment.
        self.memory = zeros((size + 2 * ALIGNMENT,), torch.uint8, torch.device("cpu"))
        self._used = -self.memory.data_ptr() % ALIGNMENT
        self._arrays: list[Array[Panel]] = []  # must outlive the structs that point to them

    def linear(self, segments: Sequence[Segment], bias: torch.Tensor | None, widened_from: int) -> Linear:
        """Pack the panels and the bias of a linear layer."""
        panels = (Panel * sum(segment.panels for segment in segments))()
        self._arrays.append(panels)
        index = 0
        for segment in segments:
            packed = self._take(segment.total_bytes).view(segment.panels, -1)
            segment.write(packed)
            for panel in packed:
                panels[index] = Panel(weight=panel.data_ptr(), kind=KIND_NUMBERS[segment.kind])
                index += 1
        return Linear(
            panels=panels,
            bias=None if bias is None else self.numbers(pad(bias, (0, -len(bias) % PANEL))),
            inputs=segments[0].weight.shape[1],
            outputs=len(panels) * PANEL,
            widened_from=widened_from,
        )

    def numbers(self, numbers: torch.Tensor | None) -> int | None:
        """The address of a float32 copy."""
        if numbers is None:
            return None
        copy = self._take(numbers.numel() * torch.float32.itemsize).view(torch.float32)
        copy.view(numbers.shape).copy_(numbers.detach())
        return copy.data_ptr()

    def _take(self, count: int) -> torch.Tensor:
        """The next `count` bytes, aligned."""
        begin = self._used
        self._used += round_up(count, ALIGNMENT)
        return self.memory[begin : begin + count]


def bytes_of(fused: FusedModel, panels: ModelPanels) -> int:
    """Bytes that the panels, norms and biases of a model take when packed."""
    layers: list[Any] = list(fused.layers)
    norms = [fused.norm, *(getattr(layer, name) for layer in layers for name in NORMS)]
    biases = [getattr(layer, name).bias for layer in layers for name in LINEARS] + [fused.head.bias]
    biases += [layer.bias for layer in (fused.fc, fused.projection) if layer is not None]
    float_bytes = [4 * (PANEL + numbers.numel()) for numbers in norms + biases if numbers is not None]
    panel_bytes = [segment.total_bytes for segment in panels.segments]
    return sum(round_up(count, ALIGNMENT) for count in (*panel_bytes, *float_bytes))
