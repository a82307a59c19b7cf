"""Quantized weights as stored in their file, and modules that compute with them."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.functional import linear

from specpool.engine.weights.quantization_types import Fields, QuantizationType
from specpool.engine.weights.threads import run_in_slices


@dataclass(frozen=True, eq=False)
class Quantized:
    """A quantized weight [rows, columns]."""

    qtype: QuantizationType
    data: torch.Tensor  # [rows, row_bytes], uint8

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.data), self.qtype.columns(self.data.shape[1])

    def rows(self, rows: torch.Tensor | slice) -> "Quantized":
        return Quantized(self.qtype, self.data[rows])

    def columns(self, columns: range) -> "Quantized | None":
        """Select columns; None if they are not whole blocks."""
        data = self.qtype.slice_columns(self.data, columns)
        return None if data is None else Quantized(self.qtype, data)

    def fields(self) -> Fields:
        return self.qtype.fields(self.data)

    def is_finite(self) -> bool:
        return self.qtype.is_finite(self.data)

    def dequantized(self) -> torch.Tensor:
        """Return the weights [rows, columns] in float32."""
        rows, columns = self.shape
        weights = torch.empty(rows, columns)

        def write(part: slice) -> None:
            weights[part] = self.qtype.dequantize(self.rows(part).fields())

        run_in_slices(write, rows, columns)
        return weights


Weight = Quantized | torch.Tensor


class QuantizedLinear(nn.Module):
    """A linear layer that concatenates the outputs of several weights."""

    def __init__(self, parts: Sequence[Weight], bias: torch.Tensor | None = None) -> None:
        """`parts`: weights with the same number of inputs."""
        super().__init__()
        self.parts = tuple(parts)
        self.out_features, self.in_features = sum(part.shape[0] for part in parts), parts[0].shape[1]
        self.bias: nn.Parameter | None
        self.register_parameter("bias", None if bias is None else nn.Parameter(bias, requires_grad=False))

    @property
    def weight(self) -> torch.Tensor:
        """The weight [outputs, inputs], dequantized at each access."""
        return torch.cat([as_tensor(part) for part in self.parts])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return linear(x, self.weight, self.bias)


class QuantizedEmbedding(nn.Module):
    """An embedding that dequantizes only the rows it looks up."""

    def __init__(self, weight: Quantized) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        rows = self.weight.rows(ids.flatten()).dequantized()
        return rows.reshape(*ids.shape, -1)


def slice_of(weight: Weight, begin: int, end: int) -> Weight:
    rows = slice(begin, end)
    return weight.rows(rows) if isinstance(weight, Quantized) else weight[rows]


def as_tensor(weight: Weight) -> torch.Tensor:
    return weight.dequantized() if isinstance(weight, Quantized) else weight


def parts_of(layer: nn.Module) -> tuple[Weight, ...]:
    """Return the weights of a linear layer, in the order of its outputs."""
    if isinstance(layer, QuantizedLinear):
        return layer.parts
    weight = layer.weight
    assert isinstance(weight, torch.Tensor)
    return (weight,)


def shares_memory(weight: Weight, layer: nn.Module) -> bool:
    """Whether a linear layer consists of exactly this weight, as tied embeddings do."""
    parts = parts_of(layer)
    return len(parts) == 1 and parts[0].data.data_ptr() == weight.data.data_ptr()


def dequantized_linear(layer: nn.Module) -> nn.Linear:
    if isinstance(layer, nn.Linear):
        return layer
    assert isinstance(layer, QuantizedLinear)
    return linear_of(layer.weight, layer.bias)


def linear_of(weight: torch.Tensor, bias: torch.Tensor | None) -> nn.Linear:
    """Wrap a weight [outputs, inputs] and a bias in a linear layer, without copying."""
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, device="meta")
    layer.weight = nn.Parameter(weight, requires_grad=False)
    if bias is not None:
        layer.bias = nn.Parameter(bias, requires_grad=False)
    return layer
