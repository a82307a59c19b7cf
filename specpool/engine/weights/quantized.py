"""Quantized weights as stored in their file, modules that compute with them, and parallel work on weights."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from threading import Barrier
from typing import TypeVar

import torch
from torch import nn
from torch.nn.functional import linear

from specpool.engine.weights.quantization_types import Fields, QuantizationType

SLICE_WEIGHTS = 1 << 18  # per slice, so that intermediate results stay in the processor's cache

T = TypeVar("T")
R = TypeVar("R")


def run_in_slices(work: Callable[[slice], None], count: int, weights_each: int) -> None:
    """Run `work` on threads for slices of `count` items with `weights_each` weights each."""
    step = max(1, SLICE_WEIGHTS // weights_each)
    map_on_threads(lambda first: work(slice(first, first + step)), range(0, count, step))


def map_on_threads(function: Callable[[T], R], items: Sequence[T]) -> list[R]:
    """Apply a function to all items, on as many threads as torch uses. Results keep the order of the items.

    Torch's own threads synchronize in every operation, so one busy core delays them all. A target took four times as
    long to load while a draft worker started on the same two cores.
    """
    threads, inference = torch.get_num_threads(), torch.is_inference_mode_enabled()
    if threads == 1:  # true on the pool's own threads, too
        return [function(item) for item in items]

    def run(item: T) -> R:
        with torch.inference_mode(inference):
            return function(item)

    return list(_pool(threads).map(run, items))


@cache
def _pool(threads: int) -> ThreadPoolExecutor:
    """Return a pool that stays alive, because there are many small weights."""
    pool, all_started = ThreadPoolExecutor(threads, "weights", _use_one_thread), Barrier(threads)
    list(pool.map(lambda _: all_started.wait(), range(threads)))
    torch.set_num_threads(threads)  # later threads inherit the number that was set last
    return pool


def _use_one_thread() -> None:
    torch.get_num_threads()  # initializes this thread, or the next operation would reset its number
    torch.set_num_threads(1)


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


@dataclass(frozen=True, eq=False)
class QuantizedExperts(Quantized):
    """The quantized weights of all experts of a layer: the rows of each expert in turn."""

    count: int  # experts

    def of_expert(self, index: int) -> Quantized:
        rows = len(self.data) // self.count
        return self.rows(slice(index * rows, (index + 1) * rows))

    def __getitem__(self, index: torch.Tensor) -> torch.Tensor:
        """Dequantize the weight of one expert, for modules of transformers."""
        return self.of_expert(int(index)).dequantized()


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

    def __init__(self, weight: Quantized, source: nn.Embedding) -> None:
        """`source`: the embedding to replace, which may scale its rows."""
        super().__init__()
        self.weight, self._source = weight, (source,)  # a tuple keeps it from becoming a submodule

    def dequantized(self, device: torch.device, dtype: torch.dtype) -> nn.Embedding:
        """Return the replaced embedding with the weight in floats."""
        (source,) = self._source
        source.weight = nn.Parameter(self.weight.dequantized().to(device, dtype), requires_grad=False)
        return source

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        rows = self.weight.rows(ids.flatten()).dequantized()
        scale = getattr(self._source[0], "embed_scale", None)
        return (rows if scale is None else rows * scale).reshape(*ids.shape, -1)


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
