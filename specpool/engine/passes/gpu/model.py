"""The fused pass as about ten kernels per layer, for GPUs.

GEMM writes partial sums, which the next kernel adds. All kernels but GEMM and attention handle one row, or one head of
a row, per program.

A rank of a sharded model holds its shard of the weights, and gathers the results of the other ranks. With `sums=parts`,
the terms of other ranks are further partial sums, so the sum over ranks takes no extra kernel.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from specpool.engine.cache.arena import KVArena
from specpool.engine.cache.layout import page_size_of
from specpool.engine.cache.spans import Span
from specpool.engine.numerics.tiles import round_up
from specpool.engine.numerics.triton_compat import triton
from specpool.engine.passes.forward_pass import ForwardPass
from specpool.engine.passes.fused import FusedModel
from specpool.engine.passes.gpu import attention
from specpool.engine.passes.gpu.attention import attend_pages, num_splits
from specpool.engine.passes.gpu.draft_loop import GpuDraftLoop
from specpool.engine.passes.gpu.gemm import MANY_ROWS, Gemm
from specpool.engine.passes.gpu.graphs import Capture
from specpool.engine.passes.gpu.inputs import GpuEmbedding
from specpool.engine.passes.gpu.rows import Addend, activate, add_and_norm, rotate_and_cache
from specpool.engine.passes.gpu.states import recorder_of, with_state_slots
from specpool.engine.passes.packing import PackedBatch, Shape, pack
from specpool.engine.sampling.head import Head
from specpool.engine.sharding.shares import Dimension

Rotary = tuple[torch.Tensor, torch.Tensor]


@torch.inference_mode()
def try_kernels(fused: FusedModel) -> None:
    """Run the kernels of one layer with one row, on all ranks at once. Raise if they cannot run this model."""
    if triton is None:
        raise RuntimeError("Triton is not installed")
    if not fused.is_plain:
        raise RuntimeError("no kernels for windows, sinks, soft caps, experts or the activation of this model")
    embedding, layer, rows = GpuEmbedding(fused), GpuLayer(fused.layers[0], 0), 1
    weight, kv_heads = fused.dense_embedding, fused.kv_heads
    columns = page_size_of(weight.device)
    arena = KVArena.of_one_sequence(1, kv_heads, columns, fused.head_dim, weight.dtype, weight.device)
    arena.flush()
    batch = pack([Span(0, 0, [0], 1)], arena, lambda needed: needed)
    states = weight.new_zeros(rows, fused.state_size) if fused.state_size else None
    inputs = embedding(replace(batch, input_states=states))
    layer(inputs.hidden, inputs.added, batch, fused.rotaries[0](rows), inputs.normed).partials.sum().item()


class GpuModel(ForwardPass):
    """Takes over the weights of a fused model layer by layer, so memory never holds them twice."""

    plans_attention = False

    def __init__(self, fused: FusedModel, max_length: int) -> None:
        """`max_length`: maximum positions of a sequence, and length of the rotary tables."""
        super().__init__()
        first: Any = fused.layers[0]
        self.group, self.compute_dtype, self.eps = fused.group, fused.compute_dtype, fused.eps
        self.heads, self.kv_heads, self.head_dim = first.heads, first.kv_heads, first.head_dim
        self.rows_per_tile = attention.rows_per_tile(self.compute_dtype, self.heads // self.kv_heads)
        self.rotary = fused.rotaries[0](max_length)
        self.embedding, self.norm = GpuEmbedding(fused), fused.norm
        self.head = Gemm(fused.head.weight, split=False)
        self.hidden_size: int = fused.dense_embedding.shape[1]
        self.state_size, self.state_norm, self.norms_output = fused.state_size, fused.state_norm, fused.norms_output
        self.projection: Gemm | None = None
        if fused.projection is not None:
            self.projection, self.projection_bias = Gemm(fused.projection.weight), fused.projection.bias
        self.layers = nn.ModuleList()
        for index in range(len(fused.layers)):
            self.layers.append(GpuLayer(fused.layers[index], index))
            fused.layers[index] = nn.Identity()

    def forward(self, batch: PackedBatch) -> torch.Tensor:
        """Logits [R, rows of the head] of the requested rows, padding included."""
        batch = with_state_slots(batch, len(self.layers))
        hidden, added, normed = self.embedding(batch)
        for layer in self.layers:
            added, normed = layer(hidden, added, batch, self.rotary, normed), None
        normed = add_and_norm(hidden, added, self.norm, self.eps, recorder_of(batch, len(self.layers)))
        own = normed if self.norms_output else hidden
        if batch.own_states is not None and batch.own_states is not own:
            batch.own_states.copy_(own if batch.logits_in_order else own[batch.logit_rows])
        if not batch.logits_in_order:
            normed = normed[batch.logit_rows]
        logits: torch.Tensor = self.head(normed)[0]
        return self.group.gather(logits, "tokens")

    def project(self, states: torch.Tensor) -> torch.Tensor:
        """Project states of the target [n, width] to those that the pass reads [n, hidden]."""
        if self.state_norm is not None:
            states = self.state_norm(states)
        if self.projection is None:
            return states
        projected = states.new_zeros(len(states), self.state_size)
        return add_and_norm(projected, Addend(self.projection(states), self.projection_bias, None), None, self.eps)

    def compile_projection(self, sizes: Sequence[int]) -> None:
        """Compile the projection of states, which no graph holds, for these numbers of rows and for long prompts."""
        if self.projection is not None:
            for rows in (*sizes, MANY_ROWS + 1):
                self.project(self.projection.weight.new_zeros(rows, self.projection.in_features))

    def gemms(self) -> list[Gemm]:
        """All GEMMs, in the order of the pass."""
        return [module for module in self.modules() if isinstance(module, Gemm)]

    def padded_rows(self, count: int) -> int:
        """Round up to one of a few sizes: multiples of 8, coarser for large batches."""
        return round_up(count, 8 if count <= 64 else 32 if count <= 256 else 64)

    def padded_shape(self, needed: Shape) -> Shape:
        """Round every size up."""
        return Shape(*map(self.padded_rows, needed))

    def captured_length(self, shape: Shape, length: int) -> int:
        """Maximum positions of sequences, up to `length`, in a captured pass of this shape.

        The same on all ranks: a pass contains collectives, so all ranks replay it or none does.
        """
        rows, tiles, _ = shape
        groups = self.heads // self.kv_heads
        return min(
            attention.captured_length(rows, tiles, length, groups * kv_heads, kv_heads, self.head_dim)
            for kv_heads in self.group.kv_heads_of_ranks(self.kv_heads)
        )

    def draft_loop(self, arena: KVArena, head: Head, capture: Capture | None = None) -> GpuDraftLoop | None:
        """The draft loop, captured or eager; None if the model is sharded: ranks synchronize once per pass."""
        return GpuDraftLoop(self, arena, head, capture) if self.group.ranks == 1 else None

    def scratch_bytes(self, rows: int, length: int) -> int:
        """Bytes of partial results of attention and GEMM, and of the tensors that ranks exchange."""
        return (
            max(gemm.scratch_bytes(rows) for gemm in self.gemms())
            + attention.scratch_bytes(rows, length, self.heads, self.kv_heads, self.head_dim, self.rows_per_tile)
            + self._exchanged_bytes(rows)
        )

    def _exchanged_bytes(self, rows: int) -> int:
        if self.group.ranks == 1:
            return 0
        state: int = rows * self.hidden_size
        gathered = self.group.ranks * state * self.compute_dtype.itemsize
        if self.group.in_parts:  # the branches of this layer's MLP and attention, and of the MLP before
            return 3 * gathered
        split_k = max(gemm.split_k for gemm in self.gemms())
        return max(gathered, 2 * split_k * state * torch.float32.itemsize)  # before and after reordering


class GpuLayer(nn.Module):
    """One decoder layer."""

    def __init__(self, fused: Any, index: int) -> None:
        """`fused`: the `FusedLayer` whose weights it takes over."""
        super().__init__()
        self.group = fused.group
        self.index, self.heads, self.scaling, self.eps = index, fused.heads, fused.scaling, fused.eps
        self.qkv, self.gate_up = self._gemm(fused.qkv, "attended"), self._gemm(fused.mlp.gate_up, "intermediate")
        self.out, self.down = self._gemm(fused.out, "hidden"), self._gemm(fused.mlp.down, "hidden")
        self.qkv_bias, self.gate_up_bias = fused.qkv.bias, fused.mlp.gate_up.bias
        self.out_bias, self.down_bias = self._gathered_bias(fused.out.bias), self._gathered_bias(fused.mlp.down.bias)
        self.before_attention, self.after_attention = fused.before_attention, fused.after_attention
        self.before_mlp, self.after_mlp, self.head_norms = fused.before_mlp, fused.after_mlp, fused.head_norms

    def forward(
        self,
        hidden: torch.Tensor,
        added: Addend | None,
        batch: PackedBatch,
        rotary: Rotary,
        normed: torch.Tensor | None = None,
    ) -> Addend:
        """Return the MLP branch, for the next kernel to add to `hidden` [rows, hidden].

        Adds `added`, the branch of the layer before, and the attention branch to `hidden` in place. `normed`: the
        input of attention, in place of `hidden`.
        """
        arena, positions, slots, offsets = batch.arena, batch.positions, batch.slots, batch.offsets
        if normed is None:
            normed = add_and_norm(hidden, added, self.before_attention, self.eps, recorder_of(batch, self.index))
        qkv = self.qkv(normed)
        query = rotate_and_cache(
            qkv, self.qkv_bias, self.head_norms, rotary, arena, self.index, positions, slots, offsets, self.heads,
            self.eps,
        )  # fmt: skip
        attended = attend_pages(
            query, arena, self.index, batch.tile_begins, batch.tile_sizes, positions, slots,
            batch.prefix_lengths, offsets, self.scaling, num_splits(batch.max_length),
        )  # fmt: skip
        added = self._addend(self.out, attended.flatten(1), "attended", self.out_bias, self.after_attention)
        gate_up = self.gate_up(add_and_norm(hidden, added, self.before_mlp, self.eps))
        activated = activate(gate_up, self.gate_up_bias, hidden.dtype)
        return self._addend(self.down, activated, "intermediate", self.down_bias, self.after_mlp)

    def _addend(
        self, gemm: Gemm, x: torch.Tensor, inputs: Dimension, bias: torch.Tensor | None, norm: torch.Tensor | None
    ) -> Addend:
        """The branch that ends with this GEMM."""
        if not self.group.in_parts or bias is None:
            return Addend(self.group.project_terms(gemm, x, inputs), bias, norm)
        # Only one rank holds the bias, so it travels within that rank's term.
        return Addend(self.group.project_terms(lambda x: gemm(x).add_(bias), x, inputs), None, norm)

    def _gemm(self, linear: nn.Linear, outputs: Dimension) -> Gemm:
        """The GEMM of this rank's shard of the outputs.

        With whole sums, split-K is that of the unsharded weight, so bits are the same as on one device. With sums
        in parts, each rank sends one term, rounded to the model's dtype, and the sum rounds once.
        """
        split = not (self.group.in_parts and outputs == "hidden")
        return Gemm(linear.weight, split, self.group.unsharded_outputs(len(linear.weight), outputs))

    def _gathered_bias(self, bias: torch.Tensor | None) -> torch.Tensor | None:
        """The full bias of a branch. With whole sums, each rank holds a shard of it."""
        return bias if bias is None or self.group.in_parts else self.group.gather(bias.detach(), "hidden")
