"""The base of recurrent layers in the fused pass: the short convolution, and checkpoints and tails in the cache.

Rows run one by one in a fixed order of operations, so the bits of a row depend only on the rows of its sequence.
`specpool.engine.cache.checkpoints` plans where the recurrence of each span begins, and which state it keeps.
"""

from abc import abstractmethod
from typing import Any

import torch

from specpool.engine.cache.checkpoints import NONE, Segment
from specpool.engine.cache.recurrent import RecurrentArena
from specpool.engine.passes.fused_layers import DecoderLayer, Linear
from specpool.engine.passes.packing import PackedBatch
from specpool.engine.sharding.group import SingleRank

FLOAT_COPIES = 6
"""Live float32 tensors of a pass as wide as the convolution; 4.6 were measured, besides gates and results."""


class RecurrentLayer(DecoderLayer):
    """A decoder layer with a short convolution over positions, which may feed a recurrence over all of them."""

    inputs: Linear
    """The first linear layer."""
    out: Linear
    """The last linear layer."""

    def __init__(self, layer: Any, recurrent_index: int, convolution: Any, config: Any, group: SingleRank) -> None:
        """`recurrent_index`: index of the layer in the recurrent arena. `convolution`: its module in transformers."""
        super().__init__(layer, config, group)
        self.recurrent_index = recurrent_index
        self.taps: torch.Tensor = convolution.weight.detach()[:, 0].T.float().contiguous()
        """Weights of the convolution, [taps, features], oldest position first."""
        self.taps_bias: torch.Tensor | None = None if convolution.bias is None else convolution.bias.detach().float()
        """Bias of the convolution, [features], or None."""

    def scratch_bytes(self, rows: int) -> int:
        """Scratch bytes of a pass of `rows` rows."""
        return rows * FLOAT_COPIES * self.taps.shape[1] * torch.float32.itemsize

    @property
    def mixer(self) -> dict[str, list[Any]]:
        """Return the linear layers of the mixer by name."""
        return {"inputs": [self.inputs], "out": [self.out]}

    @abstractmethod
    def _recurrence(
        self, convolved: torch.Tensor, gates: torch.Tensor, state: torch.Tensor, kept: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the results of positions [positions, ...], and the state after the first `kept` positions.

        `convolved`: results of the convolution, float32 [positions, features]. `gates`: [positions, gates]. `state`:
        before the first position.
        """

    def _run_segments(
        self, batch: PackedBatch, inputs: torch.Tensor, gates: torch.Tensor, shape: tuple[int, ...]
    ) -> torch.Tensor:
        """Run all rows, and write their checkpoints and tails. Return the results of the recurrence, [rows, *shape].

        `inputs`: of the convolution, [rows, features]. `gates`: float32 [rows, gates].
        """
        assert batch.arena.recurrent is not None
        results = inputs.new_zeros(len(inputs), *shape, dtype=torch.float32)
        for segment in (Segment(*numbers) for numbers in batch.segments.tolist()):
            rows = slice(segment.first_row, segment.first_row + segment.num_rows)
            if segment.num_rows:
                results[rows] = self._run(segment, inputs[rows], gates[rows], batch.arena.recurrent)
        results[batch.tokens :] = results[0]  # padding repeats the first token, and caches the same keys and values
        return results

    def _run(self, segment: Segment, inputs: torch.Tensor, gates: torch.Tensor, arena: RecurrentArena) -> torch.Tensor:
        layer, replayed = self.recurrent_index, segment.start - segment.read_position
        edges, state = torch.zeros_like(arena.edges[layer, 0]), torch.zeros_like(arena.states[layer, 0])
        if segment.read != NONE:
            edges, state = arena.edges[layer, segment.read], arena.states[layer, segment.read]
        tail = arena.inputs[layer, segment.read_tail], arena.gates[layer, segment.read_tail]
        history = torch.cat([edges, tail[0][:replayed], inputs.to(edges.dtype)])  # [taps - 1 + positions, features]
        kept = segment.write_position - segment.read_position if segment.write != NONE else 0
        of_positions = torch.cat([tail[1][:replayed], gates])
        results, state = self._recurrence(self._convolved(history), of_positions, state, kept)
        if segment.write != NONE:
            arena.states[layer, segment.write] = state
            arena.edges[layer, segment.write] = history[kept : kept + len(edges)]
        self._keep_tail(segment, inputs, gates, arena)
        return results[replayed:]

    def _convolved(self, history: torch.Tensor) -> torch.Tensor:
        """Return the results of the convolution, float32 [positions, features].

        `history`: inputs of the positions and of those before, [taps - 1 + positions, features].
        """
        history, taps = history.float(), len(self.taps)
        count = len(history) - taps + 1
        mixed = history[:count] * self.taps[0]
        for tap in range(1, taps):
            mixed = mixed + history[tap : tap + count] * self.taps[tap]
        return mixed if self.taps_bias is None else mixed + self.taps_bias

    def _keep_tail(self, segment: Segment, inputs: torch.Tensor, gates: torch.Tensor, arena: RecurrentArena) -> None:
        """Store the inputs and gates of new rows that follow the checkpoint."""
        base = segment.read_position if segment.write == NONE else segment.write_position
        skipped = max(0, base - segment.start)
        first = segment.start + skipped - base
        rows = slice(first, first + len(inputs) - skipped)
        arena.inputs[self.recurrent_index, segment.write_tail, rows] = inputs[skipped:].to(arena.inputs.dtype)
        arena.gates[self.recurrent_index, segment.write_tail, rows] = gates[skipped:]
