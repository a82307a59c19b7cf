"""Records the hidden states of passes. The layers to record may change between replays of a graph."""

from collections.abc import Sequence
from dataclasses import replace

import torch

from specpool.engine.numerics.uploads import upload
from specpool.engine.passes.gpu.rows import Recorder
from specpool.engine.passes.packing import PackedBatch

MAX_STATE_LAYERS = 8
"""Passes that record the hidden states after more layers run eagerly."""


class StateMemory:
    """Memory for hidden states that all graphs of a model share, and the table of the layers to record."""

    def __init__(self, rows: int, hidden_size: int, num_layers: int, device: torch.device) -> None:
        shape = rows, MAX_STATE_LAYERS, hidden_size
        self.states = torch.empty(shape, dtype=torch.bfloat16, device=device)
        """States of the last pass, [rows, up to `MAX_STATE_LAYERS` chosen layers, hidden]."""
        self.slots = slots_of((), num_layers, device)
        """See `PackedBatch.state_slots`."""
        self._num_layers = num_layers
        self._layers: tuple[int, ...] = ()

    @staticmethod
    def num_bytes(rows: int, hidden_size: int) -> int:
        """Bytes of the memory for states."""
        return rows * MAX_STATE_LAYERS * hidden_size * torch.bfloat16.itemsize

    def choose(self, layers: tuple[int, ...]) -> None:
        """Record the states after these layers, at most `MAX_STATE_LAYERS`, from the next pass on."""
        if layers != self._layers:
            self.slots.copy_(slots_of(layers, self._num_layers, self.slots.device))
            self._layers = layers


def slots_of(layers: Sequence[int], num_layers: int, device: torch.device) -> torch.Tensor:
    """`PackedBatch.state_slots` of these layers, on the device. The host does not wait for the copy."""
    slots = [layers.index(layer) if layer in layers else -1 for layer in range(num_layers + 1)]
    return upload(torch.tensor(slots, dtype=torch.int32), device)


def with_state_slots(batch: PackedBatch, num_layers: int) -> PackedBatch:
    """The batch, with `state_slots` if it needs states. Graphs have a table of their own."""
    if batch.states is None or batch.state_slots is not None:
        return batch
    return replace(batch, state_slots=slots_of(batch.state_layers, num_layers, batch.numbers.device))


def recorder_of(batch: PackedBatch, num_layers: int) -> Recorder | None:
    """The recorder of the hidden states after this number of layers; None if the batch has no memory for states."""
    if batch.states is None or batch.state_slots is None:
        return None
    return Recorder(batch.states, batch.state_slots, num_layers)
