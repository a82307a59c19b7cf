"""Gated delta nets in the fused pass: the weights that all fast passes read, and the torch operations.

The recurrence runs row by row in one order of operations, so the bits of a row depend only on the rows of its sequence.
`specpool.engine.cache.checkpoints` plans where the recurrence of each span begins, and which state it keeps.
"""

from typing import Any

import torch
from torch.nn import functional
from torch.nn.functional import rms_norm

from specpool.engine.cache.checkpoints import NONE, Segment
from specpool.engine.cache.recurrent import RecurrentArena
from specpool.engine.passes.fused_layers import DecoderLayer, Linear, Rotation, joined, with_outputs
from specpool.engine.passes.modules import in_chunks
from specpool.engine.passes.packing import PackedBatch
from specpool.engine.sharding.group import SingleRank

NORM_EPS = 1e-6
"""Added to the squared length of a query or key before dividing by its root."""
FLOAT_COPIES = 6
"""Live float32 tensors of a pass as wide as the convolution; 4.6 were measured, besides gates and results."""


class FusedDeltaNet(DecoderLayer):
    """A decoder layer with a gated delta net: a short convolution, then a recurrence over all positions."""

    def __init__(self, layer: Any, index: int, recurrent_index: int, config: Any, group: SingleRank) -> None:
        """`recurrent_index`: index of the layer in the recurrent arena."""
        super().__init__(layer, index, config, group)
        net = layer.linear_attn
        self.recurrent_index = recurrent_index
        self.key_heads, self.value_heads = net.num_k_heads, net.num_v_heads
        self.key_size, self.value_size = net.head_k_dim, net.head_v_dim
        self.inputs = _joined_inputs(net)
        """[features of the convolution (queries, keys, values) | z | b | a, hidden]."""
        self.taps = net.conv1d.weight.detach()[:, 0].T.float().contiguous()
        """Weights of the convolution, [taps, features], oldest position first."""
        self.rate, self.dt_bias = -net.A_log.detach().float().exp(), net.dt_bias.detach().float()
        """Log decay of each value head for a time step of 1, and its bias of time steps, [value heads]."""
        self.gate_norm = net.norm.weight.detach().float()
        """Weight of the norm before the gate z, [value size]."""
        self.out = net.out_proj

    def scratch_bytes(self, rows: int) -> int:
        """Scratch bytes of a pass of `rows` rows."""
        features: int = self.taps.shape[1]
        return rows * FLOAT_COPIES * features * torch.float32.itemsize

    @property
    def mixer(self) -> dict[str, list[Any]]:
        """Return the linear layers of the delta net by name."""
        return {"inputs": [self.inputs], "out": [self.out]}

    def _mixed(self, normed: torch.Tensor, batch: PackedBatch, rotations: list[Rotation]) -> torch.Tensor:
        assert batch.arena.recurrent is not None
        heads, values = self.value_heads, self.value_heads * self.value_size
        inputs, z, b, a = self.inputs(normed).split([self.taps.shape[1], values, heads, heads], dim=-1)
        decay = self.rate * in_chunks(functional.softplus, a.float() + self.dt_bias)
        gates = torch.cat([decay, in_chunks(torch.sigmoid, b.float().contiguous())], -1)  # [rows, 2 heads]
        read = inputs.new_zeros(len(normed), heads, self.value_size, dtype=torch.float32)
        for segment in (Segment(*numbers) for numbers in batch.segments.tolist()):
            rows = slice(segment.first_row, segment.first_row + segment.num_rows)
            if segment.num_rows:
                read[rows] = self._recurrence(segment, inputs[rows], gates[rows], batch.arena.recurrent)
        read[batch.tokens :] = read[0]  # padding repeats the first token, and caches the same keys and values
        gate = in_chunks(functional.silu, z.float().contiguous()).view(read.shape)
        gated = rms_norm(read, (self.value_size,), self.gate_norm, self.eps) * gate
        return self.group.project(self.out, gated.flatten(1).to(normed.dtype), "attended")

    def _recurrence(
        self, segment: Segment, inputs: torch.Tensor, gates: torch.Tensor, arena: RecurrentArena
    ) -> torch.Tensor:
        """Run the rows of a segment, and keep its checkpoint and tail. Return what each row reads from the state.

        `inputs`: [rows, features]. `gates`: [rows, 2 * value heads]. Return [rows, value heads, value size].
        """
        layer, replayed = self.recurrent_index, segment.start - segment.read_position
        edges, state = torch.zeros_like(arena.edges[layer, 0]), torch.zeros_like(arena.states[layer, 0])
        if segment.read != NONE:
            edges, state = arena.edges[layer, segment.read], arena.states[layer, segment.read]
        tail = arena.inputs[layer, segment.read_tail], arena.gates[layer, segment.read_tail]
        history = torch.cat([edges, tail[0][:replayed], inputs.to(edges.dtype)])  # [taps - 1 + positions, features]
        decays, betas = torch.cat([tail[1][:replayed], gates]).chunk(2, -1)
        query, key, value = self._convolved(history)
        written = segment.write_position - segment.read_position if segment.write != NONE else NONE
        read = []
        for row in range(len(value) + 1):
            if row == written:
                arena.states[layer, segment.write] = state
                arena.edges[layer, segment.write] = history[row : row + len(edges)]
            if row < len(value):
                state, attended = _step(state, query[row], key[row], value[row], decays[row], betas[row])
                read.append(attended)
        self._keep_tail(segment, inputs, gates, arena)
        return torch.stack(read[replayed:])

    def _convolved(self, history: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return queries and keys [positions, value heads, key size], and values [positions, value heads, value size].

        `history`: inputs of the positions and of those before, [taps - 1 + positions, features].
        """
        history, taps = history.float(), len(self.taps)
        count = len(history) - taps + 1
        mixed = history[:count] * self.taps[0]
        for tap in range(1, taps):
            mixed = mixed + history[tap : tap + count] * self.taps[tap]
        keys = self.key_heads * self.key_size
        query, key, value = in_chunks(functional.silu, mixed).split([keys, keys, mixed.shape[1] - 2 * keys], dim=-1)
        query, key = self._unit(query) * self.key_size**-0.5, self._unit(key)
        return query, key, value.reshape(count, self.value_heads, self.value_size)

    def _unit(self, x: torch.Tensor) -> torch.Tensor:
        """Divide each key head of `x` [positions, features] by its length, and repeat it for its value heads."""
        x = x.reshape(len(x), self.key_heads, self.key_size)
        unit: torch.Tensor = rms_norm(x, (self.key_size,), eps=NORM_EPS / self.key_size) * self.key_size**-0.5
        return unit.repeat_interleave(self.value_heads // self.key_heads, dim=1)

    def _keep_tail(self, segment: Segment, inputs: torch.Tensor, gates: torch.Tensor, arena: RecurrentArena) -> None:
        """Store the inputs and gates of new rows that follow the checkpoint."""
        base = segment.read_position if segment.write == NONE else segment.write_position
        skipped = max(0, base - segment.start)
        first = segment.start + skipped - base
        rows = slice(first, first + len(inputs) - skipped)
        arena.inputs[self.recurrent_index, segment.write_tail, rows] = inputs[skipped:].to(arena.inputs.dtype)
        arena.gates[self.recurrent_index, segment.write_tail, rows] = gates[skipped:]


def _step(
    state: torch.Tensor,  # [heads, key size, value size]
    query: torch.Tensor,  # [heads, key size]
    key: torch.Tensor,
    value: torch.Tensor,  # [heads, value size]
    decay: torch.Tensor,  # [heads], its logarithm
    beta: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run one position. Return the state after it, and what its query reads, [heads, value size].

    All shapes are those of one row, so a row has the same bits in every batch.
    """
    state = state * decay.exp()[:, None, None]
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
