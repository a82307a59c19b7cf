"""The lean pass as about ten kernels per layer, for GPUs.

Products write their parts, which the kernel after each adds up. All kernels but those of products and attention handle
one row, or one head of a row, by itself.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.functional import embedding

from engine.cache.arena import KVArena
from engine.cache.spans import Location, Span
from engine.numerics import round_up
from engine.passes.forward_pass import ForwardPass
from engine.passes.gpu import attention
from engine.passes.gpu.attention import attend_extents, splits_for
from engine.passes.gpu.draft_loop import GpuDraftLoop
from engine.passes.gpu.launching import triton
from engine.passes.gpu.products import Product
from engine.passes.gpu.rows import Addend, activate, add_and_norm, rotate_and_cache
from engine.passes.lean import LeanModel
from engine.passes.packing import PackedBatch, pack

Rotary = tuple[torch.Tensor, torch.Tensor]


def try_kernels(lean: LeanModel) -> None:
    """Runs the kernels of a layer with one row. Raises anything if they cannot run this model on its device."""
    if triton is None:
        raise RuntimeError("Triton is not installed")
    layer, rows = GpuLayer(lean.layers[0], 0), 1
    weight, kv_heads = lean.embedding, lean.kv_heads
    arena = KVArena(1, kv_heads, rows, lean.head_dim, weight.dtype, weight.device)
    batch = pack([Span(0, 0, [0], 1)], [Location(0)], arena, lambda count: count)
    layer(embedding(batch.input_ids, weight), None, batch, lean.rotary(rows)).parts.sum().item()


class GpuModel(ForwardPass):
    """Takes the weights out of a lean model layer by layer, so that there is never a second copy of all weights."""

    plans_attention = False

    def __init__(self, lean: LeanModel, longest: int) -> None:
        """`longest`: positions that a sequence can have; the tables of the rotary embedding have this length."""
        super().__init__()
        first: Any = lean.layers[0]
        self.compute_dtype, self.eps = lean.compute_dtype, lean.eps
        self.heads, self.kv_heads, self.head_dim = first.heads, first.kv_heads, first.head_dim
        self.rows_per_tile = attention.rows_per_tile(self.compute_dtype, self.heads // self.kv_heads)
        self.rotary = lean.rotary(longest)
        self.embedding, self.norm = lean.embedding, lean.norm
        self.head = Product(lean.head.weight, divided=False)
        self.layers = nn.ModuleList()
        for index in range(len(lean.layers)):
            self.layers.append(GpuLayer(lean.layers[index], index))
            lean.layers[index] = nn.Identity()

    def forward(self, batch: PackedBatch) -> torch.Tensor:
        """Logits [R, rows of the head] of the rows that the batch asks for, padding included."""
        hidden, added = embedding(batch.input_ids, self.embedding), None
        for layer in self.layers:
            added = layer(hidden, added, batch, self.rotary)
        normed = add_and_norm(hidden, added, self.norm, self.eps)
        logits: torch.Tensor = self.head(normed[batch.logit_rows])[0]
        return logits

    def products(self) -> list[Product]:
        """All products, in the order of the pass."""
        return [module for module in self.modules() if isinstance(module, Product)]

    def padded_rows(self, count: int) -> int:
        """A few sizes for all batches: multiples of 8, and coarser ones where batches are large."""
        return round_up(count, 8 if count <= 64 else 32 if count <= 256 else 64)

    def draft_loop(self, arena: KVArena, token_ids: Callable[[torch.Tensor], torch.Tensor]) -> GpuDraftLoop:
        """Steps that are launched one kernel at a time."""
        return GpuDraftLoop(self, arena, token_ids, record=None)

    def scratch_bytes(self, rows: int, longest: int) -> int:
        """Bytes of the parts of attention and of products, beyond their results."""
        parts = max(product.part_bytes(rows) for product in self.products())
        return parts + attention.scratch_bytes(
            rows, longest, self.heads, self.kv_heads, self.head_dim, self.rows_per_tile
        )


class GpuLayer(nn.Module):
    """One decoder layer."""

    def __init__(self, lean: Any, index: int) -> None:
        """`lean`: the `LeanLayer` whose weights it takes over."""
        super().__init__()
        self.index, self.heads, self.scaling, self.eps = index, lean.heads, lean.scaling, lean.eps
        self.qkv, self.out, self.gate_up, self.down = (
            Product(linear.weight) for linear in (lean.qkv, lean.out, lean.gate_up, lean.down)
        )
        self.qkv_bias, self.out_bias, self.gate_up_bias, self.down_bias = (
            linear.bias for linear in (lean.qkv, lean.out, lean.gate_up, lean.down)
        )
        self.before_attention, self.after_attention = lean.before_attention, lean.after_attention
        self.before_mlp, self.after_mlp, self.head_norms = lean.before_mlp, lean.after_mlp, lean.head_norms

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
        added = Addend(self.out(attended.flatten(1)), self.out_bias, self.after_attention)
        gate_up = self.gate_up(add_and_norm(hidden, added, self.before_mlp, self.eps))
        activated = activate(gate_up, self.gate_up_bias, hidden.dtype)
        return Addend(self.down(activated), self.down_bias, self.after_mlp)
