"""Weights that stay quantized, as in their file, and what takes the place of the library's modules for them."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.functional import linear

from specpool.engine.weights.kinds import Fields, Kind
from specpool.engine.weights.threads import in_pieces


@dataclass(frozen=True, eq=False)
class Quantized:
    """A weight [rows, columns] whose rows are bytes of a kind."""

    kind: Kind
    data: torch.Tensor
    """[rows, bytes of a row], uint8."""

    @property
    def shape(self) -> tuple[int, int]:
        """Outputs and inputs."""
        return len(self.data), self.kind.columns(self.data.shape[1])

    def rows(self, chosen: torch.Tensor | slice) -> "Quantized":
        """Some of the rows."""
        return Quantized(self.kind, self.data[chosen])

    def columns(self, chosen: range) -> "Quantized | None":
        """Some of the columns; None if these are no whole blocks."""
        part = self.kind.part(self.data, chosen)
        return None if part is None else Quantized(self.kind, part)

    def fields(self) -> Fields:
        """What the bytes mean."""
        return self.kind.fields(self.data)

    def is_finite(self) -> bool:
        """Whether all scales and offsets are finite numbers."""
        return self.kind.is_finite(self.data)

    def dequantized(self) -> torch.Tensor:
        """The weights [rows, columns] in float32."""
        rows, columns = self.shape
        weights = torch.empty(rows, columns)

        def write(some: slice) -> None:
            weights[some] = self.kind.dequantized(self.rows(some).fields())

        in_pieces(write, rows, columns)
        return weights


Weight = Quantized | torch.Tensor


class QuantizedLinear(nn.Module):
    """A linear layer whose outputs are those of its parts, one after the other."""

    def __init__(self, parts: Sequence[Weight], bias: torch.Tensor | None = None) -> None:
        """`parts`: weights with the same number of inputs."""
        super().__init__()
        self.parts = tuple(parts)
        self.out_features, self.in_features = sum(part.shape[0] for part in parts), parts[0].shape[1]
        self.bias: nn.Parameter | None
        self.register_parameter("bias", None if bias is None else nn.Parameter(bias, requires_grad=False))

    @property
    def weight(self) -> torch.Tensor:
        """The weight [outputs, inputs], dequantized anew at each use."""
        return torch.cat([as_tensor(part) for part in self.parts])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """As nn.Linear."""
        return linear(x, self.weight, self.bias)


class QuantizedEmbedding(nn.Module):
    """An embedding of which only the rows are dequantized that are looked up."""

    def __init__(self, weight: Quantized) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """As nn.Embedding."""
        rows = self.weight.rows(ids.flatten()).dequantized()
        return rows.reshape(*ids.shape, -1)


def slice_of(weight: Weight, begin: int, end: int) -> Weight:
    """Some of the rows."""
    rows = slice(begin, end)
    return weight.rows(rows) if isinstance(weight, Quantized) else weight[rows]


def as_tensor(weight: Weight) -> torch.Tensor:
    """A weight as a tensor of numbers, dequantized if need be."""
    return weight.dequantized() if isinstance(weight, Quantized) else weight


def parts_of(layer: nn.Module) -> tuple[Weight, ...]:
    """The weights of a linear layer, whose outputs follow each other."""
    if isinstance(layer, QuantizedLinear):
        return layer.parts
    weight = layer.weight
    assert isinstance(weight, torch.Tensor)
    return (weight,)


def same_memory(weight: Weight, layer: nn.Module) -> bool:
    """Whether a linear layer has no other weight than this one."""
    parts = parts_of(layer)
    return len(parts) == 1 and parts[0].data.data_ptr() == weight.data.data_ptr()


def decoded(layer: nn.Module) -> nn.Linear:
    """The same linear layer, its weight dequantized if need be."""
    if isinstance(layer, nn.Linear):
        return layer
    assert isinstance(layer, QuantizedLinear)
    return linear_of(layer.weight, layer.bias)


def linear_of(weight: torch.Tensor, bias: torch.Tensor | None) -> nn.Linear:
    """A linear layer with this weight [outputs, inputs] and bias, which are not copied."""
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, device="meta")
    layer.weight = nn.Parameter(weight, requires_grad=False)
    if bias is not None:
        layer.bias = nn.Parameter(bias, requires_grad=False)
    return layer
