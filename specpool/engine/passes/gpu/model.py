"""The fused pass as about ten kernels per layer, for GPUs.

Products write their parts, which the kernel after each adds up. All kernels but those of products and attention handle
one row, or one head of a row, by itself.

A rank of a divided model has its share of the weights, and gathers what the others compute. Where each sums its own
terms, theirs are further parts, so that the sum over ranks takes no kernel of its own.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from specpool.engine.cache.arena import KVArena
from specpool.engine.cache.spans import Location, Span
from specpool.engine.numerics.tiles import round_up
from specpool.engine.numerics.triton_compat import triton
from specpool.engine.passes.forward_pass import ForwardPass
from specpool.engine.passes.fused import FusedModel
from specpool.engine.passes.gpu import attention
from specpool.engine.passes.gpu.attention import attend_extents, splits_for
from specpool.engine.passes.gpu.draft_loop import GpuDraftLoop
from specpool.engine.passes.gpu.gemm import Product
from specpool.engine.passes.gpu.graphs import Capture
from specpool.engine.passes.gpu.rows import Addend, activate, add_and_norm, rotate_and_cache
from specpool.engine.passes.packing import PackedBatch, pack
from specpool.engine.sharding.shares import Dimension

Rotary = tuple[torch.Tensor, torch.Tensor]


@torch.inference_mode()
def try_kernels(fused: FusedModel) -> None:
    """Runs the kernels of a layer with one row, on all ranks at once. Raises anything if they cannot run this model on
    its device."""
    if triton is None:
        raise RuntimeError("Triton is not installed")
    layer, rows = GpuLayer(fused.layers[0], 0), 1
    weight, kv_heads = fused.dense_embedding, fused.kv_heads
    arena = KVArena(1, kv_heads, rows, fused.head_dim, weight.dtype, weight.device)
    batch = pack([Span(0, 0, [0], 1)], [Location(0)], arena, lambda count: count)
    layer(fused.group.embed(weight, batch.input_ids), None, batch, fused.rotary(rows)).parts.sum().item()


class GpuModel(ForwardPass):
    """Takes the weights out of a fused model layer by layer, so that there is never a second copy of all weights."""

    plans_attention = False

    def __init__(self, fused: FusedModel, longest: int) -> None:
        """`longest`: positions that a sequence can have; the tables of the rotary embedding have this length."""
        super().__init__()
        first: Any = fused.layers[0]
        self.group, self.compute_dtype, self.eps = fused.group, fused.compute_dtype, fused.eps
        self.heads, self.kv_heads, self.head_dim = first.heads, first.kv_heads, first.head_dim
        self.rows_per_tile = attention.rows_per_tile(self.compute_dtype, self.heads // self.kv_heads)
        self.rotary = fused.rotary(longest)
        self.embedding, self.norm = fused.dense_embedding, fused.norm
        self.head = Product(fused.head.weight, divided=False)
        self.layers = nn.ModuleList()
        for index in range(len(fused.layers)):
            self.layers.append(GpuLayer(fused.layers[index], index))
            fused.layers[index] = nn.Identity()

    def forward(self, batch: PackedBatch) -> torch.Tensor:
        """Logits [R, rows of the head] of the rows that the batch asks for, padding included."""
        hidden, added = self.group.embed(self.embedding, batch.input_ids), None
        for layer in self.layers:
            added = layer(hidden, added, batch, self.rotary)
        normed = add_and_norm(hidden, added, self.norm, self.eps)
        logits: torch.Tensor = self.head(normed[batch.logit_rows])[0]
        return self.group.gather(logits, "tokens")

    def products(self) -> list[Product]:
        """All products, in the order of the pass."""
        return [module for module in self.modules() if isinstance(module, Product)]

    def padded_rows(self, count: int) -> int:
        """A few sizes for all batches: multiples of 8, and coarser ones where batches are large."""
        return round_up(count, 8 if count <= 64 else 32 if count <= 256 else 64)

    def draft_loop(
        self, arena: KVArena, token_ids: Callable[[torch.Tensor], torch.Tensor], capture: Capture | None = None
    ) -> GpuDraftLoop | None:
        """Steps that are captured, or launched one kernel at a time; None if the model is divided: rank 0 tells the
        others of each pass, and of nothing within one."""
        return GpuDraftLoop(self, arena, token_ids, capture) if self.group.ranks == 1 else None

    def scratch_bytes(self, rows: int, longest: int) -> int:
        """Bytes of the parts of attention and of products, beyond their results, and of what ranks exchange."""
        parts = max(product.part_bytes(rows) for product in self.products())
        return (
            parts
            + attention.scratch_bytes(rows, longest, self.heads, self.kv_heads, self.head_dim, self.rows_per_tile)
            + self._exchanged_bytes(rows)
        )

    def _exchanged_bytes(self, rows: int) -> int:
        if self.group.ranks == 1:
            return 0
        state: int = rows * self.norm.numel()
        embedded = self.group.ranks * state * self.compute_dtype.itemsize
        if self.group.in_parts:  # what a layer adds, what its attention adds, and what the layer before has added
            return 3 * embedded
        parts = max(product.parts for product in self.products())
        return max(embedded, 2 * parts * state * torch.float32.itemsize)  # before and after they are put in order


class GpuLayer(nn.Module):
    """One decoder layer."""

    def __init__(self, fused: Any, index: int) -> None:
        """`fused`: the `FusedLayer` whose weights it takes over."""
        super().__init__()
        self.group = fused.group
        self.index, self.heads, self.scaling, self.eps = index, fused.heads, fused.scaling, fused.eps
        self.qkv, self.gate_up = self._product(fused.qkv, "attended"), self._product(fused.gate_up, "intermediate")
        self.out, self.down = self._product(fused.out, "hidden"), self._product(fused.down, "hidden")
        self.qkv_bias, self.gate_up_bias = fused.qkv.bias, fused.gate_up.bias
        self.out_bias, self.down_bias = self._whole_bias(fused.out.bias), self._whole_bias(fused.down.bias)
        self.before_attention, self.after_attention = fused.before_attention, fused.after_attention
        self.before_mlp, self.after_mlp, self.head_norms = fused.before_mlp, fused.after_mlp, fused.head_norms

    def forward(self, hidden: torch.Tensor, added: Addend | None, batch: PackedBatch, rotary: Rotary) -> Addend:
        """What the end of this layer adds to the hidden states [rows, hidden]: the next kernel does it. Everything
        before, `added` of the layer before included, is added here in place."""
        arena, positions, columns = batch.arena, batch.positions, batch.columns
        qkv = self.qkv(add_and_norm(hidden, added, self.before_attention, self.eps))
        query = rotate_and_cache(
            qkv, self.qkv_bias, self.head_norms, rotary, arena, self.index, positions, columns, self.heads, self.eps
        )
        keys, values, splits = arena.keys[self.index], arena.values[self.index], splits_for(batch.longest)
        attended = attend_extents(
            query, keys, values, batch.tile_begins, batch.tile_sizes, positions, columns, self.scaling, splits
        )
        added = self._addend(self.out, attended.flatten(1), "attended", self.out_bias, self.after_attention)
        gate_up = self.gate_up(add_and_norm(hidden, added, self.before_mlp, self.eps))
        activated = activate(gate_up, self.gate_up_bias, hidden.dtype)
        return self._addend(self.down, activated, "intermediate", self.down_bias, self.after_mlp)

    def _addend(
        self, product: Product, x: torch.Tensor, inputs: Dimension, bias: torch.Tensor | None, norm: torch.Tensor | None
    ) -> Addend:
        """A product that is added to the hidden states."""
        if not self.group.in_parts or bias is None:
            return Addend(self.group.project_terms(product, x, inputs), bias, norm)
        # Only one rank has the bias. All of them have to add it, so it travels as a part of that rank's term.
        return Addend(self.group.project_terms(lambda x: product(x).add_(bias), x, inputs), None, norm)

    def _product(self, linear: nn.Linear, outputs: Dimension) -> Product:
        """A product with this rank's share of outputs.

        Where sums are whole, it has as many parts as on one device, so that their bits are the same. Where each rank
        sums its own terms of what is added to the hidden states, it sends one part, rounded to the model's dtype: vLLM
        sends no more, and each sum here is rounded once, not once for each rank that adds to it.
        """
        divided = not (self.group.in_parts and outputs == "hidden")
        return Product(linear.weight, divided, self.group.unsharded_outputs(len(linear.weight), outputs))

    def _whole_bias(self, bias: torch.Tensor | None) -> torch.Tensor | None:
        """The bias of what is added to the hidden states, of which a rank has its share of features."""
        return bias if bias is None or self.group.in_parts else self.group.gather(bias.detach(), "hidden")
