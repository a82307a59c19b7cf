"""Memory in which captured passes record hidden states, after layers that may change between replays."""

from collections.abc import Sequence

import torch

MAX_STATE_LAYERS = 8
"""Passes that record the hidden states after more layers run eagerly."""


class StateMemory:
    """Memory for hidden states that all graphs of a model share, and the table of the layers to record."""

    def __init__(self, rows: int, hidden_size: int, num_layers: int, device: torch.device) -> None:
        shape = rows, MAX_STATE_LAYERS, hidden_size
        self.states = torch.empty(shape, dtype=torch.bfloat16, device=device)
        """States of the last pass, [rows, up to `MAX_STATE_LAYERS` chosen layers, hidden]."""
        self.slots = slots_of((), num_layers, device).to(device)
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
            self.slots.copy_(slots_of(layers, self._num_layers, self.slots.device), non_blocking=True)
            self._layers = layers


def slots_of(layers: Sequence[int], num_layers: int, device: torch.device) -> torch.Tensor:
    """`PackedBatch.state_slots` of these layers, in host memory that `device` reads without waiting."""
    slots = [layers.index(layer) if layer in layers else -1 for layer in range(num_layers + 1)]
    return torch.tensor(slots, dtype=torch.int32, pin_memory=device.type == "cuda")
