"""The KV cache: one slot a sequence in one arena. How many of a slot's positions count is an integer elsewhere
(`engine.slots`), and in which column a position lies is the layout's choice (`engine.layout`)."""

import math

import numpy as np
import torch


class KVArena:
    """Keys and values of all layers, each [slots, kv_heads, columns, head_dim].

    Zeroed once, because attention multiplies masked values by zero and a NaN would survive that. On a CPU the system
    does it, page by page, so that positions that were never used take no memory.
    """

    def __init__(
        self,
        layers: int,
        slots: int,
        kv_heads: int,
        columns: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.slots, self.columns, self.device = slots, columns, device
        self._storage = _zeros((layers, 2, slots, kv_heads, columns, head_dim), dtype, device)
        self.keys, self.values = list(self._storage[:, 0]), list(self._storage[:, 1])

    def write(
        self, layer: int, slots: torch.Tensor, columns: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> None:
        """Stores `key` and `value` [T, kv_heads, head_dim] of T tokens at (slots[t], columns[t])."""
        if key.dtype == torch.float16:  # where an overflow is in reach, and would outlive its sequence in the slot
            key, value = key.nan_to_num(0.0, 0.0, 0.0), value.nan_to_num(0.0, 0.0, 0.0)
        self.keys[layer][slots, :, columns] = key
        self.values[layer][slots, :, columns] = value

    def copy(self, source: int, destination: int, column: int, count: int) -> None:
        """Copies `count` columns of all layers, from `column` on, from one slot to the same place in another."""
        columns = slice(column, column + count)
        self._storage[:, :, destination, :, columns] = self._storage[:, :, source, :, columns]

    def move(self, slot: int, source: int, destination: int, count: int) -> None:
        """Copies `count` columns of a slot, of all layers, from column `source` on to column `destination` on."""
        columns = self._storage[:, :, slot, :, source : source + count].clone()  # the two ranges may overlap
        self._storage[:, :, slot, :, destination : destination + count] = columns


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """RuntimeError or MemoryError if there is no room. `torch.zeros` would write every page of the host's memory."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    return torch.from_numpy(np.zeros(math.prod(shape) * dtype.itemsize, np.uint8)).view(dtype).view(shape)
