"""The weights of a compiled pass, packed into panels in one tensor, and the activations of its GEMMs."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence, Set
from ctypes import Array
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import pad

from specpool.engine.cache.memory import zeros
from specpool.engine.config.options import FLOAT32, INT8, Activations, Int8RefusedError
from specpool.engine.numerics.tiles import round_up
from specpool.engine.passes.fused import FusedModel
from specpool.engine.passes.fused_experts import FusedExperts
from specpool.engine.passes.fused_layers import FusedLayer
from specpool.engine.passes.native.decoder import NORMS, RECURRENT_NUMBERS, Linear, Panel
from specpool.engine.passes.native.panels import KIND_NUMBERS, PANEL, Segment, segments_of
from specpool.engine.sharding.group import SINGLE_RANK, SingleRank
from specpool.engine.weights.quantization_types import QUANTIZATION_TYPES
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
        [{name: _stacked(linears) for name, linears in layer.linears.items()} for layer in layers],
        segments_of(parts_of(fused.head)),
        None if tied else segments_of([fused.embedding]),
        *(() if layer is None else segments_of(parts_of(layer)) for layer in (fused.fc, fused.projection)),
    )


def _stacked(linears: Sequence[Any]) -> list[Segment]:
    """Return the panels of all these linear layers. No panel spans two layers."""
    return [segment for linear in linears for segment in segments_of(parts_of(linear))]


def stacked_bias(linears: Sequence[Any]) -> torch.Tensor | None:
    """Return the biases of linear layers, each padded to whole panels; None if they have none."""
    biases = [pad(linear.bias, (0, -len(linear.bias) % PANEL)) for linear in linears if linear.bias is not None]
    return torch.cat(biases) if biases else None


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
            for panel in range(segment.panels):
                weight = packed.data_ptr() + panel * segment.panel_bytes
                panels[index] = Panel(weight=weight, kind=KIND_NUMBERS[segment.kind])
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
    input_norms = None if fused.input_norms is None else fused.input_norms.weight
    vectors = [fused.norm, input_norms, *(each for layer in layers for each in numbers_of(layer).values())]
    biases = [stacked_bias(linears) for layer in layers for linears in layer.linears.values()] + [fused.head.bias]
    biases += [layer.bias for layer in (fused.fc, fused.projection) if layer is not None]
    float_bytes = [4 * (PANEL + numbers.numel()) for numbers in vectors + biases if numbers is not None]
    panel_bytes = [segment.total_bytes for segment in panels.segments]
    return sum(round_up(count, ALIGNMENT) for count in (*panel_bytes, *float_bytes))


def numbers_of(layer: Any) -> dict[str, torch.Tensor | None]:
    """The float32 numbers of a decoder layer that no GEMM reads, by their names in the struct."""
    numbers = {name: getattr(layer, name, None) for name in (*NORMS, *RECURRENT_NUMBERS)}
    if isinstance(layer, FusedLayer):
        numbers["sinks"] = layer.attention.sinks
    if isinstance(layer.mlp, FusedExperts):
        gate = layer.mlp.shared_gate
        numbers |= {"correction": layer.mlp.correction, "shared_gate": None if gate is None else gate.weight}
    return numbers


MIXED = "mixed"
"""The kind of a panel that spans weights of different kinds, some of them quantized."""


def resolve_activations(
    option: Activations,
    kinds: Set[str],
    group: SingleRank = SINGLE_RANK,
    report: Callable[[str], None] = lambda note: None,
) -> str:
    """Return "int8" or "float32" for a compiled pass, the same on all ranks of a group.

    `kinds`: of this rank's GEMM weights, from `gemm_kinds`. `report`: called with a note for the operator if quantized
    weights keep float32. Int8RefusedError: int8 is required, but no weights are quantized, or some had to be
    dequantized.
    """
    if option == FLOAT32:
        return FLOAT32
    # A dequantized panel would keep float32 activations, and which outputs it has depends on the number of ranks.
    is_mixed = group.any_rank(MIXED in kinds)
    if is_mixed and option == INT8:
        raise Int8RefusedError(
            f"weights that share a panel of {PANEL} outputs to have one type, but this model mixes several there"
        )
    if is_mixed:
        report(f"its activations stay float32, because weights of several types share a panel of {PANEL} outputs")
        return FLOAT32
    is_quantized = group.any_rank(not kinds.isdisjoint(QUANTIZATION_TYPES))
    if option == INT8 and not is_quantized:
        supported = ", ".join(kind for kind, qtype in QUANTIZATION_TYPES.items() if qtype.block > 1)
        raise Int8RefusedError(f"a trained draft, or a GGUF file with weights in {supported}")
    return INT8 if is_quantized else FLOAT32


def gemm_kinds(panels: ModelPanels) -> Set[str]:
    """The kinds of a model's GEMM weights, including MIXED if there are mixed panels.

    Without an embedding that is not tied to the head: no GEMM uses it.
    """
    of_layers = (linear for layer in panels.layers for linear in layer.values())
    linears = [*of_layers, panels.head, panels.fc, panels.projection]
    return {MIXED if segment.is_mixed else segment.kind for linear in linears for segment in linear}
