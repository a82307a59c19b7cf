"""What every forward pass has in common, so that the engine and its probes need not know which one they have."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Set
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import torch
from torch import nn

from engine.passes.packing import PackedBatch


class CompiledProducts(Protocol):
    """Matrix products in compiled code of our own, which a probe of torch's operations cannot see."""

    @property
    def product_inputs(self) -> Set[int]:
        """The different numbers of inputs that products of the pass have."""

    @property
    def weight_dtype(self) -> torch.dtype:
        """Dtype in which weights are kept."""

    def product_with(self, weight: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
        """The product of float32 rows [n, inputs] with a weight [outputs, inputs], as a pass computes it.

        `outputs` is a multiple of a panel.
        """


class ForwardPass(nn.Module, ABC):
    """Computes the logits of packed batches; a module that holds all weights it needs."""

    compute_dtype: torch.dtype
    """Dtype of activations and of the KV cache."""
    plans_attention: bool = True
    """Whether batches need an attention plan; without one the pass finds the cached positions by itself."""
    exact_by_construction: bool = False
    """Whether a row has the same bits in every batch without any padding, so that no tiles have to be found."""
    row_multiple: int = 1
    """The rows of a batch are padded to a multiple of this, so that there are few different shapes."""

    @abstractmethod
    def forward(self, batch: PackedBatch) -> torch.Tensor:
        """Logits [R, rows of the head] of the rows that the batch asks for, possibly followed by padding."""

    def scratch_bytes(self, rows: int, longest: int) -> int:
        """Bytes that attention takes for a pass of `rows` rows over sequences of `longest` positions, beyond its
        results."""
        return 0

    def launched(self) -> AbstractContextManager[None]:
        """A context in which every operation of a pass is launched one by one, where a probe can see it."""
        return nullcontext()

    @property
    def compiled_products(self) -> CompiledProducts | None:
        """The products of a compiled pass; None if all operations are torch's."""
        return None
