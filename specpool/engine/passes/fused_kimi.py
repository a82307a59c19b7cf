"""Kimi Linear's delta nets in the fused pass, by torch operations. Each feature of a key has a decay of its own."""

from typing import Any

import torch
from torch import nn
from torch.nn import functional

from specpool.engine.passes.fused_delta_net import DeltaNet
from specpool.engine.passes.fused_layers import Rotation, joined
from specpool.engine.passes.modules import in_chunks
from specpool.engine.passes.packing import PackedBatch
from specpool.engine.sharding.group import SingleRank


class FusedKimiDeltaNet(DeltaNet):
    """A decoder layer with a gated delta net. Its decays and output gates come from two linear layers each."""

    def __init__(self, layer: Any, recurrent_index: int, config: Any, group: SingleRank) -> None:
        """`recurrent_index`: index of the layer in the recurrent arena."""
        net, forget = layer.linear_attn, layer.linear_attn.forget_gate
        super().__init__(layer, recurrent_index, net.conv1d, config, group)
        self.key_heads = self.value_heads = net.num_heads
        self.key_size = self.value_size = net.head_dim
        self.inputs = joined(net.q_proj, net.k_proj, net.v_proj, net.b_proj, forget.f_a_proj, net.g_a_proj)
        """[features of the convolution (queries, keys, values) | b | inputs of `decays` | inputs of `read_gates`]."""
        self.decays, self.read_gates = forget.f_b_proj, net.g_b_proj
        self.rate, self.dt_bias = -forget.A_log.detach().float().exp().flatten(), forget.dt_bias.detach().float()
        """Log decay of each head for a time step of 1, [heads], and the bias of time steps, [heads * key size]."""
        self.gate_norm = net.o_norm.weight.detach().float()
        self.out = net.o_proj

    @property
    def mixer(self) -> dict[str, list[Any]]:
        """Return the linear layers of the delta net by name."""
        return {**super().mixer, "decays": [self.decays], "read_gates": [self.read_gates]}

    def _mixed(self, normed: torch.Tensor, batch: PackedBatch, rotations: list[Rotation]) -> torch.Tensor:
        heads, size = self.value_heads, self.value_size
        inputs, b, f, g = self.inputs(normed).split([self.taps.shape[1], heads, size, size], dim=-1)
        steps = in_chunks(functional.softplus, self.decays(f.contiguous()).float() + self.dt_bias)
        decays = (self.rate[:, None] * steps.view(-1, heads, size)).flatten(1)
        gates = torch.cat([decays, in_chunks(torch.sigmoid, b.float().contiguous())], -1)
        read = self._run_segments(batch, inputs, gates, (heads, size))
        read_gates = in_chunks(torch.sigmoid, self.read_gates(g.contiguous()).float())
        return self._gated(read, read_gates, normed.dtype)


class NoRotaryEmbedding(nn.Module):
    """Rotates no features."""

    inv_freq = torch.empty(0)

    def forward(self, like: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the cosines and sines of no angles, [..., positions, 0]."""
        tables = like.new_empty(2, *positions.shape, 0)
        return tables[0], tables[1]


def adapt_modules(model: Any) -> None:
    """Give a Kimi Linear model the module names of Qwen3-Next and a rotary embedding. It cannot run afterwards."""
    model.rotary_emb = NoRotaryEmbedding()
    for layer in model.layers:
        if hasattr(layer.self_attn, "forget_gate"):
            layer.linear_attn = layer.self_attn
            del layer.self_attn
