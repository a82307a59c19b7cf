"""The decoder layers of a GPU model.

A layer mixes rows of a sequence by attention, latent attention, a gated delta net, or a gated short convolution.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from specpool.engine.cache.layout import page_size_of
from specpool.engine.cache.recurrent import tail_rows
from specpool.engine.passes.fused_delta_net import FusedDeltaNet
from specpool.engine.passes.fused_experts import FusedExperts
from specpool.engine.passes.fused_latent import FusedLatentLayer
from specpool.engine.passes.fused_recurrent import RecurrentLayer
from specpool.engine.passes.fused_short_conv import FusedShortConv
from specpool.engine.passes.gpu.attention import attend_pages, num_splits
from specpool.engine.passes.gpu.branches import BranchEnd, GpuMlp, gemm_of
from specpool.engine.passes.gpu.delta_net import run_segments
from specpool.engine.passes.gpu.experts import GpuExperts
from specpool.engine.passes.gpu.gates import gated, gated_norm
from specpool.engine.passes.gpu.gemm import Gemm
from specpool.engine.passes.gpu.head_gemm import HeadGemm
from specpool.engine.passes.gpu.latent import cache_latents, split_queries
from specpool.engine.passes.gpu.rows import Addend, add_and_norm, rotate_and_cache
from specpool.engine.passes.gpu.short_conv import convolve_gated
from specpool.engine.passes.gpu.states import recorder_of
from specpool.engine.passes.kinds import AttentionKind
from specpool.engine.passes.packing import PackedBatch

Rotary = tuple[torch.Tensor, torch.Tensor]


class GpuLayer(nn.Module):
    """One decoder layer."""

    def __init__(self, fused: Any, index: int, cache_index: int | None = None) -> None:
        """`fused`: the `DecoderLayer` whose weights it takes over. `cache_index`: replaces that of the fused layer."""
        super().__init__()
        self.index, self.eps = index, fused.eps
        self.rotary: int = 0 if isinstance(fused, RecurrentLayer) else fused.rotary
        """Index of the layer's rotary tables."""
        self.mixer = _MIXERS.get(type(fused), GpuAttention)(fused, cache_index)
        mlp_class = GpuExperts if isinstance(fused.mlp, FusedExperts) else GpuMlp
        self.mlp = mlp_class(fused.mlp, fused.after_mlp, fused.group)
        self.before_attention, self.before_mlp = fused.before_attention, fused.before_mlp

    def forward(
        self,
        hidden: torch.Tensor,
        added: Addend | None,
        batch: PackedBatch,
        rotary: Rotary,
        normed: torch.Tensor | None = None,
    ) -> Addend:
        """Return the MLP branch, for the next kernel to add to `hidden` [rows, hidden].

        Adds `added`, the branch of the layer before, and the branch of the mixer to `hidden` in place. `normed`: the
        input of the mixer, in place of `hidden`.
        """
        if normed is None:
            normed = add_and_norm(hidden, added, self.before_attention, self.eps, recorder_of(batch, self.index))
        normed = add_and_norm(hidden, self.mixer(normed, batch, rotary), self.before_mlp, self.eps)
        branch: Addend = self.mlp(normed, batch.slots) if isinstance(self.mlp, GpuExperts) else self.mlp(normed)
        return branch


class GpuAttention(nn.Module):
    """Attention to the positions of a sequence up to each row's own."""

    def __init__(self, fused: Any, cache_index: int | None = None) -> None:
        """`fused`: the `FusedLayer` whose weights it takes over."""
        super().__init__()
        self.cache_index: int = fused.cache_index if cache_index is None else cache_index
        self.heads, self.head_dim, self.scaling, self.eps = fused.heads, fused.head_dim, fused.scaling, fused.eps
        self.kind: AttentionKind = fused.attention
        self.qkv, self.qkv_bias = gemm_of(fused.qkv, "attended", fused.group), fused.qkv.bias
        self.first_gate: int | None = (fused.heads + 2 * fused.kv_heads) * fused.head_dim if fused.gated else None
        """The first feature of the gates, beside queries, keys and values; None without gates."""
        self.out = BranchEnd(fused.out, "attended", fused.after_attention, fused.group)
        self.head_norms = fused.head_norms

    def forward(self, normed: torch.Tensor, batch: PackedBatch, rotary: Rotary) -> Addend:
        """Return the branch of normalized rows [rows, hidden]."""
        arena, positions, slots, offsets = batch.arena, batch.positions, batch.slots, batch.offsets
        qkv = self.qkv(normed)
        query = rotate_and_cache(
            qkv, self.qkv_bias, self.head_norms, rotary, arena, self.cache_index, positions, slots, offsets,
            self.heads, self.eps,
        )  # fmt: skip
        attended = attend_pages(
            query, arena, self.cache_index, batch.tile_begins, batch.tile_sizes, positions, slots,
            batch.prefix_lengths, offsets, self.scaling, num_splits(batch.max_length), self.kind,
        )  # fmt: skip
        if self.first_gate is not None:
            attended = gated(attended, qkv, self.qkv_bias, self.first_gate)
        branch: Addend = self.out(attended.flatten(1))
        return branch


class GpuLatentAttention(nn.Module):
    """Attention to cached latent vectors, from which keys and values would be computed."""

    def __init__(self, fused: Any, cache_index: int | None = None) -> None:
        """`fused`: the `FusedLatentLayer` whose weights it takes over."""
        super().__init__()
        self.cache_index: int = fused.cache_index if cache_index is None else cache_index
        self.head_dim, self.scaling, self.eps = fused.head_dim, fused.scaling, fused.latent_eps
        self.inputs, self.inputs_bias = Gemm(fused.inputs.weight), fused.inputs.bias
        self.norms = fused.query_norm, fused.latent_norm
        self.query_up, self.query_bias = None, None
        if fused.query_up is not None:
            self.query_up, self.query_bias = Gemm(fused.query_up.weight), fused.query_up.bias
        self.key_up, self.value_up = (
            HeadGemm(torch.stack([up.weight.detach() for up in ups])) for ups in (fused.key_ups, fused.value_ups)
        )
        self.out = BranchEnd(fused.out, "attended", fused.after_attention, fused.group)

    def forward(self, normed: torch.Tensor, batch: PackedBatch, rotary: Rotary) -> Addend:
        """Return the branch of normalized rows [rows, hidden]."""
        arena, positions, slots, offsets = batch.arena, batch.positions, batch.slots, batch.offsets
        partials, bias = self.inputs(normed), self.inputs_bias
        latents = cache_latents(
            partials, bias, self.norms, rotary, arena, self.cache_index, positions, slots, offsets, self.eps
        )
        if self.query_up is not None:
            partials, bias = self.query_up(latents), self.query_bias
        query = normed.new_empty(len(normed), self.key_up.heads, self.head_dim)
        self.key_up(split_queries(partials, bias, rotary, positions, query, self.key_up.in_features), query)
        attended = attend_pages(
            query, arena, self.cache_index, batch.tile_begins, batch.tile_sizes, positions, slots,
            batch.prefix_lengths, offsets, self.scaling, num_splits(batch.max_length),
        )  # fmt: skip
        branch: Addend = self.out(self.value_up(attended).flatten(1))
        return branch

    def scratch_bytes(self, rows: int) -> int:
        """Bytes of the queries, before and after absorption, and of the attended vectors of a pass."""
        ups, itemsize = (self.key_up, self.value_up), self.key_up.weight.element_size()
        features = 2 * self.head_dim + sum(up.in_features + up.out_features for up in ups)
        count: int = rows * self.key_up.heads * features * itemsize
        return count


class GpuDeltaNet(nn.Module):
    """A gated delta net: a short convolution, then a recurrence over all positions of a sequence."""

    def __init__(self, fused: Any, cache_index: int | None = None) -> None:
        """`fused`: the `FusedDeltaNet` whose weights it takes over."""
        super().__init__()
        self.cache_index: int = fused.recurrent_index if cache_index is None else cache_index
        self.inputs, self.taps, self.rates, self.biases = (
            Gemm(fused.inputs.weight),
            fused.taps,
            fused.rate,
            fused.dt_bias,
        )
        self.gate_norm, self.eps = fused.gate_norm, fused.eps
        self.out = BranchEnd(fused.out, "attended", fused.after_attention, fused.group)

    def forward(self, normed: torch.Tensor, batch: PackedBatch, rotary: Rotary) -> Addend:
        """Return the branch of normalized rows [rows, hidden]."""
        recurrent = batch.arena.recurrent
        assert recurrent is not None
        inputs = self.inputs(normed)
        read = run_segments(inputs, recurrent, self.cache_index, batch.segments, self.taps, self.rates, self.biases)
        branch: Addend = self.out(gated_norm(read, inputs, self.taps.shape[1], self.gate_norm, normed.dtype, self.eps))
        return branch

    def scratch_bytes(self, rows: int, segments: int) -> int:
        """Bytes of the prepared rows of a pass, replayed rows included, and of what new rows read."""
        replayed = segments * tail_rows(page_size_of(self.taps.device))
        numbers: int = (rows + replayed) * (self.taps.shape[1] + 2 * len(self.rates))
        return (numbers + rows * self.out.gemm.in_features) * torch.float32.itemsize


class GpuShortConv(nn.Module):
    """A gated short convolution over the last positions of a sequence."""

    def __init__(self, fused: Any, cache_index: int | None = None) -> None:
        """`fused`: the `FusedShortConv` whose weights it takes over."""
        super().__init__()
        self.cache_index: int = fused.recurrent_index if cache_index is None else cache_index
        self.inputs, self.inputs_bias = Gemm(fused.inputs.weight), fused.inputs.bias
        self.taps, self.taps_bias = fused.taps, fused.taps_bias
        self.out = BranchEnd(fused.out, "attended", fused.after_attention, fused.group)

    def forward(self, normed: torch.Tensor, batch: PackedBatch, rotary: Rotary) -> Addend:
        """Return the branch of normalized rows [rows, hidden]."""
        recurrent = batch.arena.recurrent
        assert recurrent is not None
        convolved = convolve_gated(
            self.inputs(normed), self.inputs_bias, recurrent, self.cache_index, batch.segments, self.taps,
            self.taps_bias,
        )  # fmt: skip
        branch: Addend = self.out(convolved)
        return branch


_MIXERS: Mapping[type, Callable[..., nn.Module]] = MappingProxyType(
    {FusedDeltaNet: GpuDeltaNet, FusedLatentLayer: GpuLatentAttention, FusedShortConv: GpuShortConv}
)
"""Mixers by the class of the layer whose weights they take over. Others are `GpuAttention`."""
