"""The fused pass as about ten kernels per layer, for GPUs. `layers` has the layers.

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
from specpool.engine.cache.checkpoints import NONE, Segment
from specpool.engine.cache.layout import page_size_of
from specpool.engine.cache.recurrent import RecurrentArena, tail_rows
from specpool.engine.cache.spans import Span
from specpool.engine.numerics.tiles import round_up
from specpool.engine.numerics.triton_compat import triton
from specpool.engine.passes.forward_pass import ForwardPass
from specpool.engine.passes.fused import FusedModel
from specpool.engine.passes.fused_latent import FusedLatentLayer
from specpool.engine.passes.fused_layers import DecoderLayer, FusedLayer
from specpool.engine.passes.gpu import attention
from specpool.engine.passes.gpu.draft_loop import GpuDraftLoop
from specpool.engine.passes.gpu.experts import GpuExperts
from specpool.engine.passes.gpu.gemm import MANY_ROWS, Gemm
from specpool.engine.passes.gpu.graphs import Capture
from specpool.engine.passes.gpu.head_gemm import HeadGemm
from specpool.engine.passes.gpu.inputs import GpuEmbedding
from specpool.engine.passes.gpu.layers import GpuDeltaNet, GpuLatentAttention, GpuLayer
from specpool.engine.passes.gpu.rows import Addend, add_and_norm, cap_logits
from specpool.engine.passes.gpu.states import recorder_of, with_state_slots
from specpool.engine.passes.kinds import AttentionKind
from specpool.engine.passes.packing import PackedBatch, Shape, pack
from specpool.engine.sampling.head import Head


@torch.inference_mode()
def try_kernels(fused: FusedModel) -> None:
    """Run one row through a layer of each kind, on all ranks at once. Raise if the kernels cannot run this model."""
    if triton is None:
        raise RuntimeError("Triton is not installed")
    if fused.uncompiled_layers is not None:
        raise RuntimeError(f"no kernels for {fused.uncompiled_layers}")
    weight, kv_heads, rows = fused.dense_embedding, fused.kv_heads, 1
    columns = page_size_of(weight.device)
    arena = KVArena.of_one_sequence(
        1, kv_heads, columns, fused.head_dim, weight.dtype, weight.device, fused.latent_rank
    )
    arena.flush()
    sizes, segments = fused.recurrent_sizes, list[Segment]()
    if sizes is not None:
        tail = tail_rows(columns)
        arena.recurrent = RecurrentArena(sizes._replace(layers=1), 1, 1, tail, weight.dtype, weight.device)
        segments.append(Segment(0, 1, 0, NONE, 0, 0, 0, 1, 1))
    batch = pack([Span(0, 0, [0], 1)], arena, lambda needed: needed, segments=segments)
    states = weight.new_zeros(rows, fused.state_size) if fused.state_size else None
    hidden, added, normed = GpuEmbedding(fused)(replace(batch, input_states=states))
    layers: Any = fused.layers
    kinds = [_kind_of(layer) for layer in layers]
    for layer in (layers[kinds.index(kind)] for kind in dict.fromkeys(kinds)):
        own = GpuLayer(layer, index=0, cache_index=0)
        added, normed = own(hidden, added, batch, fused.rotaries[own.rotary](rows), normed), None
    add_and_norm(hidden, added, None, fused.eps).sum().item()
    if fused.softcap is not None:
        cap_logits(hidden, fused.softcap).sum().item()


class GpuModel(ForwardPass):
    """Takes over the weights of a fused model layer by layer, so memory never holds them twice."""

    plans_attention = False

    def __init__(self, fused: FusedModel, max_length: int, max_sequences: int = 1) -> None:
        """`max_length`: maximum positions of a sequence, and length of the rotary tables.

        `max_sequences`: maximum number of sequences in a pass, for models with recurrent layers.
        """
        super().__init__()
        attending = [layer for layer in fused.layers if isinstance(layer, FusedLayer | FusedLatentLayer)]
        first = attending[0]
        self.recurrent_sizes = fused.recurrent_sizes
        self.max_segments = 0 if self.recurrent_sizes is None else max_sequences
        """Maximum number of segments of recurrent layers in a pass; 0: there are no such layers."""
        self.group, self.compute_dtype, self.eps = fused.group, fused.compute_dtype, fused.eps
        self.heads, self.kv_heads, self.head_dim = first.heads, first.kv_heads, first.head_dim
        self.latent_rank = fused.latent_rank
        """Leading features of a cached key that are also its value, in latent attention; None: values are separate."""
        self._value_dim, is_latent = fused.latent_rank or self.head_dim, fused.latent_rank is not None
        self.rows_per_tile = attention.rows_per_tile(self.compute_dtype, self.heads // self.kv_heads, is_latent)
        self.rotaries, self.softcap = [rotary(max_length) for rotary in fused.rotaries], fused.softcap
        for layer in attending:
            window = layer.attention.window
            if window is not None and window >= max_length:  # full attention is faster
                layer.attention = layer.attention._replace(window=None)
        kinds: list[AttentionKind] = [layer.attention for layer in attending]
        self.attention_kinds = tuple({_flags_of(kind): kind for kind in kinds}.values())
        windows = [kind.window for kind in kinds if kind.window is not None]
        self.window = max(windows) if len(windows) == len(kinds) else None
        """The longest window of all layers; None if a layer attends to all positions."""
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
        layers: Any = self.layers
        for layer in layers:
            added, normed = layer(hidden, added, batch, self.rotaries[layer.rotary], normed), None
        normed = add_and_norm(hidden, added, self.norm, self.eps, recorder_of(batch, len(self.layers)))
        own = normed if self.norms_output else hidden
        if batch.own_states is not None and batch.own_states is not own:
            batch.own_states.copy_(own if batch.logits_in_order else own[batch.logit_rows])
        if not batch.logits_in_order:
            normed = normed[batch.logit_rows]
        logits: torch.Tensor = self.head(normed)[0]
        if self.softcap is not None:
            logits = cap_logits(logits, self.softcap)
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

    def experts(self) -> list[GpuExperts]:
        """All mixtures of experts, in the order of the pass."""
        return [module for module in self.modules() if isinstance(module, GpuExperts)]

    def head_gemms(self) -> list[HeadGemm]:
        """All GEMMs with a weight per head, in the order of the pass."""
        return [module for module in self.modules() if isinstance(module, HeadGemm)]

    @property
    def supports_branches(self) -> bool:
        """Whether spans may be branches of their sequences. Recurrent layers cannot run them."""
        return not self.max_segments

    def padded_rows(self, count: int) -> int:
        """Round up to one of a few sizes: multiples of 8, coarser for large batches."""
        return round_up(count, 8 if count <= 64 else 32 if count <= 256 else 64)

    def padded_shape(self, needed: Shape) -> Shape:
        """Round every size up but the segments, which no kernel is compiled for."""
        return Shape(*map(self.padded_rows, needed))._replace(segments=needed.segments)

    def captured_length(self, shape: Shape, length: int) -> int:
        """Maximum positions of sequences, up to `length`, in a captured pass of this shape.

        The same on all ranks: a pass contains collectives, so all ranks replay it or none does.
        """
        rows, tiles = shape.rows, shape.tiles
        groups = self.heads // self.kv_heads
        return min(
            attention.captured_length(
                rows,
                tiles,
                length,
                groups * kv_heads,
                kv_heads,
                self._value_dim,
                self.window,
                self.latent_rank is not None,
            )
            for kv_heads in self.group.kv_heads_of_ranks(self.kv_heads)
        )

    def draft_loop(self, arena: KVArena, head: Head, capture: Capture | None = None) -> GpuDraftLoop | None:
        """The draft loop, captured or eager; None if the pass has none.

        Ranks of a sharded model synchronize once per pass.
        """
        return GpuDraftLoop(self, arena, head, capture) if self.group.ranks == 1 else None

    def scratch_bytes(self, rows: int, length: int) -> int:
        """Bytes of partial results of attention and GEMM, and of the tensors that ranks exchange."""
        parts: list[Gemm | GpuExperts] = [*self.gemms(), *self.experts()]
        partials = max(each.scratch_bytes(rows) for each in parts)
        partials += attention.scratch_bytes(
            rows, length, self.heads, self.kv_heads, self._value_dim, self.rows_per_tile, self.window,
            self.latent_rank is not None,
        )  # fmt: skip
        segments = min(rows, self.padded_rows(self.max_segments))  # a step of the draft loop has one per row
        nets = [module for module in self.modules() if isinstance(module, GpuDeltaNet)]
        partials += max((net.scratch_bytes(rows, segments) for net in nets), default=0)
        latents = [module for module in self.modules() if isinstance(module, GpuLatentAttention)]
        partials += max((each.scratch_bytes(rows) for each in latents), default=0)
        return partials + self._exchanged_bytes(rows)

    def _exchanged_bytes(self, rows: int) -> int:
        if self.group.ranks == 1:
            return 0
        state: int = rows * self.hidden_size
        gathered = self.group.ranks * state * self.compute_dtype.itemsize
        if self.group.in_parts:  # the branches of this layer's MLP and attention, and of the MLP before
            return 3 * gathered
        split_k = max(gemm.split_k for gemm in self.gemms())
        return max(gathered, 2 * split_k * state * torch.float32.itemsize)  # before and after reordering


def _kind_of(layer: DecoderLayer) -> tuple[Any, ...]:
    """Return a key that is equal for layers that run the same kernels."""
    attention = _flags_of(layer.attention) if isinstance(layer, FusedLayer) else ()
    return type(layer), attention, type(layer.mlp), layer.mlp.activation


def _flags_of(kind: AttentionKind) -> tuple[Any, ...]:
    return kind.window, kind.sinks is not None, kind.softcap
