"""What every forward pass has in common, so that the engine and its probes need not know which one they have."""

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Mapping, Set
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import torch
from torch import nn

from specpool.engine.cache.arena import KVArena
from specpool.engine.cache.memory import weights_of
from specpool.engine.passes.packing import PackedBatch
from specpool.engine.weights.quantized import Weight


class CompiledProducts(Protocol):
    """Matrix products in compiled code of our own, which a probe of torch's operations cannot see."""

    @property
    def product_inputs(self) -> Set[int]:
        """The different numbers of inputs that products of the pass have."""

    @property
    def kinds(self) -> Mapping[str, int]:
        """Bytes of the weights of products by the kinds in which they are kept."""

    def product_with(self, weight: Weight, widened_from: int | None = None) -> Callable[[torch.Tensor], torch.Tensor]:
        """The product of float32 rows [n, inputs] with a weight [outputs, inputs], as a pass computes it.

        `outputs` is a multiple of a panel, and the weight of a kind that the pass has, or float32 that bfloat16 cannot
        hold. `widened_from`: rows from which panels are widened into the cache; default: as the pass does it.
        """


class DraftLoop(Protocol):
    """Runs steps of one token, each on the choices of the one before."""

    def first(self, logits: torch.Tensor) -> torch.Tensor:
        """The choices after the logits [n, rows of the head]: tokens and probabilities, [2, n], as float64."""

    def __call__(
        self, chosen: torch.Tensor, positions: list[int], columns: list[int], wanted: list[int], longest: int
    ) -> torch.Tensor:
        """Goes on from the choices [2, n] of n sequences. Returns all choices, theirs included, [1 + steps, 2, n].

        `positions`, `columns`: of the chosen tokens. `wanted`: how many more tokens each sequence wants; once it has
        them, nothing more is cached for it. `longest`: positions of the longest sequence in the end.
        """


class ForwardPass(nn.Module, ABC):
    """Computes the logits of packed batches; a module that holds all weights it needs."""

    compute_dtype: torch.dtype
    """Dtype of activations and of the KV cache."""
    plans_attention: bool = True
    """Whether batches need an attention plan; without one the pass finds the cached positions by itself."""
    exact_by_construction: bool = False
    """Whether a row has the same bits in every batch without any padding, so that no tiles have to be found."""
    rows_per_tile: int = 1
    """Most rows of a sequence that share a tile of attention, in a pass without an attention plan."""

    def __init__(self) -> None:
        super().__init__()
        self.notes: list[str] = []
        """What an operator should know about this pass, such as what it had to do without."""

    @abstractmethod
    def forward(self, batch: PackedBatch) -> torch.Tensor:
        """Logits [R, rows of the head] of the rows that the batch asks for, possibly followed by padding."""

    def padded_rows(self, count: int) -> int:
        """How many rows a batch of `count` tokens, or of logits, is padded to, so that there are few different shapes.

        Only a pass without an attention plan may ask for padding: its padding is neither cached nor attended.
        """
        return count

    def scratch_bytes(self, rows: int, longest: int) -> int:
        """Bytes that a pass of `rows` rows over sequences of `longest` positions takes beyond what is counted as
        activations."""
        return 0

    def launched(self) -> AbstractContextManager[None]:
        """A context in which every operation of a pass is launched one by one, where a probe can see it."""
        return nullcontext()

    def draft_loop(self, arena: KVArena, token_ids: Callable[[torch.Tensor], torch.Tensor]) -> DraftLoop | None:
        """Steps on this cache without a host in the loop, where the device can do them.

        `token_ids`: the tokens of rows of the head.
        """
        return None

    @property
    def weight_kinds(self) -> Mapping[str, int]:
        """Bytes of the weights by the kind in which they are kept: a dtype, or a kind of quantized weights."""
        found = Counter[str]()
        for weight in weights_of(self):
            found[str(weight.dtype).removeprefix("torch.")] += weight.numel() * weight.element_size()
        return found

    @property
    def compiled_products(self) -> CompiledProducts | None:
        """The products of a compiled pass; None if all operations are torch's."""
        return None
