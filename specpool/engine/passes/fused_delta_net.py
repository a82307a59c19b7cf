"""Gated delta nets in the fused pass: the weights that all fast passes read, and the torch operations."""

from typing import Any

import torch
from torch.nn import functional
from torch.nn.functional import rms_norm

from specpool.engine.passes.fused_layers import Linear, Rotation, joined, with_outputs
from specpool.engine.passes.fused_recurrent import RecurrentLayer
from specpool.engine.passes.modules import in_chunks
from specpool.engine.passes.packing import PackedBatch
from specpool.engine.sharding.group import SingleRank

NORM_EPS = 1e-6
"""Added to the squared length of a query or key before dividing by its root."""


class DeltaNet(RecurrentLayer):
    """A decoder layer with a gated delta net: a short convolution, then a recurrence over all positions.

    Gates are the log decays of each value head, one or one per feature of the key, then the beta of each value head.
    """

    key_heads: int
    value_heads: int
    key_size: int
    value_size: int
    gate_norm: torch.Tensor
    """Weight of the norm before the output gate, [value size]."""

    def _gated(self, read: torch.Tensor, gate: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Return the branch [rows, hidden]. `read`: results of the queries, [rows, value heads, value size]."""
        gated = rms_norm(read, (self.value_size,), self.gate_norm, self.eps) * gate.view(read.shape)
        return self.group.project(self.out, gated.flatten(1).to(dtype), "attended")

    def _recurrence(
        self, convolved: torch.Tensor, gates: torch.Tensor, state: torch.Tensor, kept: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        query, key, value = self._heads(convolved)
        decays, betas = gates.split([gates.shape[1] - self.value_heads, self.value_heads], -1)
        decays = decays.reshape(len(decays), self.value_heads, -1)
        read, kept_state = [], state
        for row in range(len(value)):
            state, attended = _step(state, query[row], key[row], value[row], decays[row], betas[row])
            read.append(attended)
            if row + 1 == kept:
                kept_state = state
        return torch.stack(read), kept_state

    def _heads(self, convolved: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return queries and keys [positions, value heads, key size], and values [..., value size]."""
        keys = self.key_heads * self.key_size
        query, key, value = in_chunks(functional.silu, convolved).split([keys, keys, convolved.shape[1] - 2 * keys], -1)
        query, key = self._unit(query) * self.key_size**-0.5, self._unit(key)
        return query, key, value.reshape(len(value), self.value_heads, self.value_size)

    def _unit(self, x: torch.Tensor) -> torch.Tensor:
        """Divide each key head of `x` [positions, features] by its length, and repeat it for its value heads."""
        x = x.reshape(len(x), self.key_heads, self.key_size)
        unit: torch.Tensor = rms_norm(x, (self.key_size,), eps=NORM_EPS / self.key_size) * self.key_size**-0.5
        return unit.repeat_interleave(self.value_heads // self.key_heads, dim=1)


class FusedDeltaNet(DeltaNet):
    """A delta net of Qwen3-Next or Qwen3.5, with one decay for each value head."""

    def __init__(self, layer: Any, recurrent_index: int, config: Any, group: SingleRank) -> None:
        """`recurrent_index`: index of the layer in the recurrent arena."""
        net = layer.linear_attn
        super().__init__(layer, recurrent_index, net.conv1d, config, group)
        self.key_heads, self.value_heads = net.num_k_heads, net.num_v_heads
        self.key_size, self.value_size = net.head_k_dim, net.head_v_dim
        self.inputs = _joined_inputs(net)
        """[features of the convolution (queries, keys, values) | z | b | a, hidden]."""
        self.rate, self.dt_bias = -net.A_log.detach().float().exp(), net.dt_bias.detach().float()
        """Log decay of each value head for a time step of 1, and its bias of time steps, [value heads]."""
        self.gate_norm = net.norm.weight.detach().float()
        self.out = net.out_proj

    def _mixed(self, normed: torch.Tensor, batch: PackedBatch, rotations: list[Rotation]) -> torch.Tensor:
        heads, values = self.value_heads, self.value_heads * self.value_size
        inputs, z, b, a = self.inputs(normed).split([self.taps.shape[1], values, heads, heads], dim=-1)
        decay = self.rate * in_chunks(functional.softplus, a.float() + self.dt_bias)
        gates = torch.cat([decay, in_chunks(torch.sigmoid, b.float().contiguous())], -1)  # [rows, 2 heads]
        read = self._run_segments(batch, inputs, gates, (heads, self.value_size))
        return self._gated(read, in_chunks(functional.silu, z.float().contiguous()), normed.dtype)


def _step(
    state: torch.Tensor,  # [heads, key size, value size]
    query: torch.Tensor,  # [heads, key size]
    key: torch.Tensor,
    value: torch.Tensor,  # [heads, value size]
    decay: torch.Tensor,  # [heads, 1 or key size], its logarithm
    beta: torch.Tensor,  # [heads]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run one position. Return the state after it, and the result of its query [heads, value size].

    Every operation has the shape of one row, so a row has the same bits in every batch.
    """
    state = state * decay.exp()[..., None]
    change = (value - (state * key[..., None]).sum(1)) * beta[:, None]
    state = state + key[..., None] * change[:, None]
    return state, (state * query[..., None]).sum(1)


def _joined_inputs(net: Any) -> Linear:
    if hasattr(net, "in_proj_qkv"):
        return joined(net.in_proj_qkv, net.in_proj_z, net.in_proj_b, net.in_proj_a)
    # Qwen3-Next orders the outputs by key head: query, key, values and z of each, and b and a of each.
    groups = net.num_v_heads // net.num_k_heads
    values = groups * net.head_v_dim
    wide = _by_part(net.in_proj_qkvz, net.num_k_heads, [net.head_k_dim, net.head_k_dim, values, values])
    return joined(wide, _by_part(net.in_proj_ba, net.num_k_heads, [groups, groups]))


def _by_part(linear: Linear, heads: int, sizes: list[int]) -> Linear:
    """Return the layer with the first part of every head, then the second, and so on. `sizes`: of the parts."""
    parts = torch.arange(linear.out_features).view(heads, -1).split(sizes, dim=1)
    return with_outputs(linear, torch.cat([part.flatten() for part in parts]))
