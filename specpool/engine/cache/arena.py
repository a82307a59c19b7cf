"""The KV cache: one arena of columns in pages, and the table of each sequence's pages.

A sequence addresses logical columns: page i of its table holds the logical columns from `i * page_size` on. Pages are
allocated in `pages`, and their valid lengths tracked in `slots`.
"""

from collections.abc import Callable, Sequence
from typing import Self

import numpy as np
import torch

from specpool.engine.cache.memory import return_pages, zeros


class KVArena:
    """Keys and values of all layers, each [kv_heads, columns, head_dim], and the tables [slots, pages of a sequence].

    The arena starts as zeros: attention multiplies masked values by zero, and a NaN would survive that. On a CPU the
    system zeroes it page by page, so unused columns take no memory.
    """

    def __init__(
        self,
        layers: int,
        kv_heads: int,
        columns: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
        tables: tuple[int, int],
        page_size: int,
    ) -> None:
        """`tables`: their shape."""
        self.columns, self.device, self.page_size = columns, device, page_size
        self._storage = zeros((layers, 2, kv_heads, columns, head_dim), dtype, device)
        self.keys, self.values = list(self._storage[:, 0]), list(self._storage[:, 1])
        self._host_tables = np.zeros(tables, np.int32)
        self.tables = torch.from_numpy(self._host_tables)
        """Pages of each sequence, int32 [slots, pages], on the device. Entries beyond a sequence's pages are stale."""
        self._unsent: list[tuple[int, Sequence[int]]] = []
        """Entries that the device lacks: index of the first, and pages."""
        if device.type != "cpu":
            self.tables = self.tables.to(device)
        self.on_assign: Callable[[int, int, Sequence[int]], None] = lambda slot, first, pages: None
        """Called before every `assign` with its arguments."""

    @classmethod
    def of_one_sequence(
        cls, layers: int, kv_heads: int, columns: int, head_dim: int, dtype: torch.dtype, device: torch.device
    ) -> Self:
        """An arena for one sequence, in slot 0, whose columns are in order."""
        arena = cls(layers, kv_heads, columns, head_dim, dtype, device, (1, 1), columns)
        arena.assign(0, 0, [0])
        return arena

    def clear(self) -> None:
        """Forget all columns. On a CPU, they take no memory until they are used again."""
        return_pages(self._storage)

    def assign(self, slot: int, first: int, pages: Sequence[int]) -> None:
        """Write pages into the table of a slot, from entry `first` on. A device gets them with the next `flush`."""
        self.on_assign(slot, first, pages)
        self._host_tables[slot, first : first + len(pages)] = pages
        if self.device.type != "cpu":
            self._unsent.append((slot * self._host_tables.shape[1] + first, pages))

    def flush(self) -> None:
        """Send new entries of the tables to the device, in the order of its work."""
        if not self._unsent:
            return
        entries = [(first + i, page) for first, pages in self._unsent for i, page in enumerate(pages)]
        self._unsent.clear()
        latest = torch.tensor([*dict(entries).items()]).T.contiguous().pin_memory().to(self.device, non_blocking=True)
        self.tables.view(-1)[latest[0]] = latest[1].int()

    def columns_of(self, slot: int, first: int, count: int) -> list[int]:
        """The columns of `count` logical columns of a slot, from `first` on."""
        size = self.page_size
        logical = np.arange(first, first + count)
        columns: list[int] = (self._host_tables[slot, logical // size] * size + logical % size).tolist()
        return columns

    def write(self, layer: int, columns: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
        """Store `key` and `value` [T, kv_heads, head_dim]; token t goes to column `columns[t]`."""
        # Masked attention multiplies these columns by zero, and zero times an overflow is NaN.
        key, value = key.nan_to_num(0.0, 0.0, 0.0), value.nan_to_num(0.0, 0.0, 0.0)
        self.keys[layer][:, columns] = key.transpose(0, 1)
        self.values[layer][:, columns] = value.transpose(0, 1)
