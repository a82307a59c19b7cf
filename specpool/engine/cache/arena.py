"""The KV cache: one arena of columns, in which every sequence has an extent (`specpool.engine.cache.extents`).

The arena does not know how many columns of an extent are valid (`specpool.engine.cache.slots`), nor which column holds
a position (`specpool.engine.cache.layout`).
"""

from collections.abc import Callable

import torch

from specpool.engine.cache.memory import zeros


class KVArena:
    """Keys and values of all layers, each [kv_heads, columns, head_dim].

    The arena is zeroed once, because attention multiplies masked values by zero and a NaN would survive that. On a CPU
    the system zeroes it page by page, so columns that were never used take no memory.
    """

    def __init__(
        self, layers: int, kv_heads: int, columns: int, head_dim: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.columns, self.device = columns, device
        self._storage = zeros((layers, 2, kv_heads, columns, head_dim), dtype, device)
        self.keys, self.values = list(self._storage[:, 0]), list(self._storage[:, 1])
        self.before_move: Callable[[int, int, int], None] = lambda source, destination, count: None
        """Called with the arguments of every `move` before it is done."""

    def write(self, layer: int, columns: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
        """Stores `key` and `value` [T, kv_heads, head_dim] of T tokens; those of token t in column `columns[t]`."""
        # Other sequences may attend to these columns with a weight of zero, and zero times an overflow is not zero.
        key, value = key.nan_to_num(0.0, 0.0, 0.0), value.nan_to_num(0.0, 0.0, 0.0)
        self.keys[layer][:, columns] = key.transpose(0, 1)
        self.values[layer][:, columns] = value.transpose(0, 1)

    def move(self, source: int, destination: int, count: int) -> None:
        """Copies `count` columns of all layers from column `source` to column `destination`; the ranges may overlap."""
        self.before_move(source, destination, count)
        # Layer by layer, so that the temporary copy is of one layer and not of the whole extent.
        for cache in (*self.keys, *self.values):
            cache[:, destination : destination + count] = cache[:, source : source + count].clone()
