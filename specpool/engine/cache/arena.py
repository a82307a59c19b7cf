"""The KV cache: one arena of columns, in which every sequence owns an extent.

Extents are allocated in `extents`, their valid lengths tracked in `slots`, and positions mapped to columns in `layout`.
"""

from collections.abc import Callable

import torch

from specpool.engine.cache.memory import return_pages, zeros


class KVArena:
    """Keys and values of all layers, each [kv_heads, columns, head_dim].

    The arena starts as zeros: attention multiplies masked values by zero, and a NaN would survive that. On a CPU the
    system zeroes it page by page, so unused columns take no memory.
    """

    def __init__(
        self, layers: int, kv_heads: int, columns: int, head_dim: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.columns, self.device = columns, device
        self._storage = zeros((layers, 2, kv_heads, columns, head_dim), dtype, device)
        self.keys, self.values = list(self._storage[:, 0]), list(self._storage[:, 1])
        self.before_move: Callable[[int, int, int], None] = lambda source, destination, count: None
        """Called before every `move` with its arguments."""

    def clear(self) -> None:
        """Forget all columns. On a CPU, they take no memory until they are used again."""
        return_pages(self._storage)

    def write(self, layer: int, columns: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
        """Store `key` and `value` [T, kv_heads, head_dim]; token t goes to column `columns[t]`."""
        # Masked attention multiplies these columns by zero, and zero times an overflow is NaN.
        key, value = key.nan_to_num(0.0, 0.0, 0.0), value.nan_to_num(0.0, 0.0, 0.0)
        self.keys[layer][:, columns] = key.transpose(0, 1)
        self.values[layer][:, columns] = value.transpose(0, 1)

    def move(self, source: int, destination: int, count: int) -> None:
        """Copy `count` columns of all layers from `source` to `destination`; the ranges may overlap."""
        self.before_move(source, destination, count)
        # One layer at a time keeps the temporary copy small.
        for cache in (*self.keys, *self.values):
            cache[:, destination : destination + count] = cache[:, source : source + count].clone()
