"""Sizes of recurrent layers and of the states that a slot of the cache keeps. Imports no torch."""

from collections.abc import Callable
from math import prod
from typing import Any, NamedTuple

from specpool.engine.config.architectures import KIMI_LINEAR, SHORT_CONVS

CHECKPOINTS_PER_SEQUENCE = 2
CHECKPOINTS_PER_SLOT = CHECKPOINTS_PER_SEQUENCE + 1
"""The checkpoints of a sequence, and one for the prefix cache."""
FLOAT32_BYTES = 4


class RecurrentSizes(NamedTuple):
    """Sizes of the recurrent layers of a model, equal in all of them. `itemsize`: bytes of a cached input."""

    layers: int
    state: tuple[int, int, int]
    """Shape of a layer's state: [heads, key size, value size]. All are 0 in layers with only a convolution."""
    inputs: int
    """Features of a position that the short convolution reads."""
    taps: int
    """Positions that the short convolution reads, including the row's own."""
    gates: int
    """Float32 numbers of a position besides its inputs, such as the log decay and beta of each head."""

    def checkpoint_bytes(self, itemsize: int) -> int:
        """Bytes of a checkpoint. States are float32."""
        return self.layers * (prod(self.state) * FLOAT32_BYTES + (self.taps - 1) * self.inputs * itemsize)

    def tails_bytes(self, itemsize: int, rows: int) -> int:
        """Bytes of the two tails of a slot, of `rows` rows each."""
        row = self.layers * (self.inputs * itemsize + self.gates * FLOAT32_BYTES)
        return CHECKPOINTS_PER_SEQUENCE * rows * row

    def sequence_bytes(self, itemsize: int, rows: int) -> int:
        """Bytes of a sequence: its checkpoints, each with a tail of `rows` rows."""
        return CHECKPOINTS_PER_SEQUENCE * self.checkpoint_bytes(itemsize) + self.tails_bytes(itemsize, rows)

    def slot_bytes(self, itemsize: int, rows: int) -> int:
        """Bytes of a slot: those of a sequence, and a checkpoint for the prefix cache."""
        return CHECKPOINTS_PER_SLOT * self.checkpoint_bytes(itemsize) + self.tails_bytes(itemsize, rows)


def read_recurrent_sizes(model_type: str, layers: int, read: Callable[[str], Any]) -> RecurrentSizes:
    """Read the sizes of recurrent layers. `read`: returns a size by its key in a configuration of transformers."""
    if model_type in SHORT_CONVS:
        return RecurrentSizes(layers, (0, 0, 0), inputs=read("hidden_size"), taps=read("conv_L_cache"), gates=0)
    taps = read("linear_conv_kernel_dim")
    if model_type == KIMI_LINEAR:
        heads, size = read("linear_num_heads"), read("linear_head_dim")
        inputs, gates = 3 * heads * size, heads * size + heads
        return RecurrentSizes(layers, (heads, size, size), inputs, taps, gates)
    keys, values = read("linear_num_key_heads"), read("linear_num_value_heads")
    key_size, value_size = read("linear_key_head_dim"), read("linear_value_head_dim")
    inputs = 2 * keys * key_size + values * value_size
    return RecurrentSizes(layers, (values, key_size, value_size), inputs, taps, gates=2 * values)
