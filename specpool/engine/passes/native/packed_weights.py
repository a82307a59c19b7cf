"""The weights of a compiled pass, as it keeps them."""

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
from specpool.engine.passes.native.panels import NUMBERS, PANEL, Segment, segments_of
from specpool.engine.passes.native.structures import NORMS, PRODUCTS, Linear, Panel
from specpool.engine.weights.quantized import parts_of, shares_memory

ALIGNMENT = 128
"""Bytes: two cache lines, which processors fetch together."""

Product = Sequence[Segment]
"""All panels of a product."""


@dataclass(frozen=True)
class Products:
    """The panels of all products of a model, before they are written."""

    layers: list[Mapping[str, Product]]
    head: Product
    embedding: Product | None
    """None: the head's."""

    @property
    def all(self) -> list[Product]:
        """Each of them once."""
        each = [product for layer in self.layers for product in layer.values()]
        return [*each, self.head, *([] if self.embedding is None else [self.embedding])]

    @property
    def kinds(self) -> Counter[str]:
        """Bytes of weights by their kinds."""
        found = Counter[str]()
        for segment in (segment for product in self.all for segment in product):
            found[segment.kind] += segment.panels * segment.panel_bytes
        return found


def products_of(fused: FusedModel) -> Products:
    """The products of a model, with its weights as they are stored, or in the smaller dtype that holds them."""
    layers: list[Any] = list(fused.layers)
    tied = shares_memory(fused.embedding, fused.head)
    return Products(
        [{name: segments_of(parts_of(getattr(layer, name))) for name in PRODUCTS} for layer in layers],
        segments_of(parts_of(fused.head)),
        None if tied else segments_of([fused.embedding]),
    )


class PackedWeights:
    """Panels and numbers in one tensor, for large pages: a step took up to a fifth longer if each had its own."""

    def __init__(self, size: int) -> None:
        """`size`: bytes of all that will be kept, as `bytes_of` gives them."""
        # Some more, since products read up to 3 bytes beyond the last panel, and the memory may begin anywhere.
        self.memory = zeros((size + 2 * ALIGNMENT,), torch.uint8, torch.device("cpu"))
        self._used = -self.memory.data_ptr() % ALIGNMENT
        self._arrays: list[Array[Panel]] = []  # they live as long as the panels

    def product(self, product: Product, bias: torch.Tensor | None, widened_from: int) -> Linear:
        """Writes the panels of a product."""
        panels = (Panel * sum(segment.panels for segment in product))()
        self._arrays.append(panels)
        at = 0
        for segment in product:
            written = self._take(segment.panels * segment.panel_bytes).view(segment.panels, -1)
            segment.write(written)
            for its in written:
                panels[at] = Panel(weight=its.data_ptr(), kind=NUMBERS[segment.kind])
                at += 1
        return Linear(
            panels=panels,
            bias=None if bias is None else self.numbers(pad(bias, (0, -len(bias) % PANEL))),
            inputs=product[0].weight.shape[1],
            outputs=len(panels) * PANEL,
            widened_from=widened_from,
        )

    def numbers(self, numbers: torch.Tensor | None) -> int | None:
        """The address of a copy in float32."""
        if numbers is None:
            return None
        copy = self._take(numbers.numel() * torch.float32.itemsize).view(torch.float32)
        copy.view(numbers.shape).copy_(numbers.detach())
        return copy.data_ptr()

    def _take(self, count: int) -> torch.Tensor:
        """The next so many bytes."""
        begin = self._used
        self._used += round_up(count, ALIGNMENT)
        return self.memory[begin : begin + count]


def bytes_of(fused: FusedModel, products: Products) -> int:
    """Bytes that the panels of a model and its other weights take."""
    layers: list[Any] = list(fused.layers)
    norms = [fused.norm, *(getattr(layer, name) for layer in layers for name in NORMS)]
    biases = [getattr(layer, name).bias for layer in layers for name in PRODUCTS] + [fused.head.bias]
    numbers = [PANEL + its.numel() for its in norms + biases if its is not None]
    panels = [segment.panels * segment.panel_bytes for product in products.all for segment in product]
    return sum(round_up(count, ALIGNMENT) for count in [*panels, *(4 * count for count in numbers)])
