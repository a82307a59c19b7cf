"""Recurrent states of layers such as gated delta nets, kept so that rejected tokens can be undone exactly.

A checkpoint holds the state of all recurrent layers after some number of positions. The inputs of later positions go to
the checkpoint's tail, so any later state can be computed again from them, with the same bits. `checkpoints` decides
which checkpoints exist; the passes read and write these tensors as a batch's segments say.
"""

import torch

from specpool.engine.cache.memory import return_pages, zeros
from specpool.engine.config.recurrent_sizes import RecurrentSizes
from specpool.protocol.rounds import MAX_LOOKUP_TOKENS


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
