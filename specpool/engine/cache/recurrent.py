"""Recurrent states of layers such as gated delta nets, kept so that rejected tokens can be undone exactly.

A checkpoint holds the state of all recurrent layers after some number of positions. The inputs of later positions go to
the checkpoint's tail, so any later state can be computed again from them, with the same bits. `checkpoints` decides
which checkpoints exist; the passes read and write these tensors as a batch's segments say.
"""

from math import prod
from typing import NamedTuple

import torch

from specpool.engine.cache.memory import return_pages, zeros
from specpool.protocol.rounds import MAX_LOOKUP_TOKENS

CHECKPOINTS_PER_SEQUENCE = 2
CHECKPOINTS_PER_SLOT = CHECKPOINTS_PER_SEQUENCE + 1
"""The checkpoints of a sequence, and one for the prefix cache."""


class RecurrentSizes(NamedTuple):
    """Sizes of the recurrent layers of a model, equal in all of them."""

    layers: int
    state: tuple[int, int, int]
    """Shape of a layer's state: [heads, key size, value size]. All are 0 in layers with only a convolution."""
    inputs: int
    """Features of a position that the short convolution reads."""
    taps: int
    """Positions that the short convolution reads, including the row's own."""
    gates: int
    """Float32 numbers of a position besides its inputs, such as the log decay and beta of each head."""

    def checkpoint_bytes(self, dtype: torch.dtype) -> int:
        """Bytes of a checkpoint. `dtype`: of the inputs; states are float32."""
        state = prod(self.state) * torch.float32.itemsize
        return self.layers * (state + (self.taps - 1) * self.inputs * dtype.itemsize)

    def tails_bytes(self, dtype: torch.dtype, rows: int) -> int:
        """Bytes of the two tails of a slot, of `rows` rows each."""
        row = self.layers * (self.inputs * dtype.itemsize + self.gates * torch.float32.itemsize)
        return CHECKPOINTS_PER_SEQUENCE * rows * row

    def sequence_bytes(self, dtype: torch.dtype, rows: int) -> int:
        """Bytes of a sequence: its checkpoints, each with a tail of `rows` rows."""
        return CHECKPOINTS_PER_SEQUENCE * self.checkpoint_bytes(dtype) + self.tails_bytes(dtype, rows)

    def slot_bytes(self, dtype: torch.dtype, rows: int) -> int:
        """Bytes of a slot: those of a sequence, and a checkpoint for the prefix cache."""
        return CHECKPOINTS_PER_SLOT * self.checkpoint_bytes(dtype) + self.tails_bytes(dtype, rows)


def tail_rows(page_size: int) -> int:
    """Rows of a tail: those of a draft, or those after the last page border of a prompt."""
    return max(page_size, MAX_LOOKUP_TOKENS)


class RecurrentArena:
    """Checkpoints and tails of all recurrent layers.

    Tail 2 * slot + i is one of the two tails of a slot. Row r of a tail is the position r positions after its
    checkpoint's.
    """

    def __init__(
        self, sizes: RecurrentSizes, entries: int, slots: int, rows: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        """`entries`: number of checkpoints. `rows`: rows of a tail. `dtype`: of inputs."""
        layers, inputs = sizes.layers, sizes.inputs
        self.sizes, self.entries, self.rows = sizes, entries, rows
        self.states = zeros((layers, entries, *sizes.state), torch.float32, device)
        """States after each checkpoint's position, [layers, entries, heads, key size, value size]."""
        self.edges = zeros((layers, entries, sizes.taps - 1, inputs), dtype, device)
        """Inputs of the last positions before each checkpoint's, oldest first; zeros before position 0."""
        self.inputs = zeros((layers, 2 * slots, rows, inputs), dtype, device)
        """Inputs of the rows of tails, before the convolution."""
        self.gates = zeros((layers, 2 * slots, rows, sizes.gates), torch.float32, device)
        """Gates of the rows of tails."""

    def clear(self) -> None:
        """Forget everything. On a CPU, it takes no memory until it is used again."""
        for tensor in (self.states, self.edges, self.inputs, self.gates):
            return_pages(tensor)
