"""The KV cache: one arena of columns, divided into pages, and a page table per sequence.

A sequence addresses logical columns. Page i of its table holds `page_size` of them, starting at `i * page_size`.
`pages` allocates the pages, and `slots` tracks how many positions are valid.
"""

from collections.abc import Callable, Sequence
from typing import Self

import numpy as np
import torch

from specpool.engine.cache.memory import return_pages, zeros
from specpool.engine.cache.recurrent import RecurrentArena
from specpool.engine.numerics.uploads import upload

SPARE_COLUMNS = 17
"""Unused columns after each head on a CPU. If the distance between heads were a multiple of a memory page, passes over
long sequences would take 6% longer (8 sequences of 1,024 positions on an AMD EPYC)."""


class KVArena:
    """Keys and values of all layers, each [kv_heads, columns, head_dim], and page tables [slots, pages per sequence].

    With latent attention, a value is the first features of its key, so `values` are views of `keys`.

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
        recurrent: RecurrentArena | None = None,
        latent_rank: int | None = None,
    ) -> None:
        """`layers`: layers that attend. `columns`: columns of all pages. `tables`: shape of the page tables.

        `recurrent`: states of the recurrent layers, if there are any. `latent_rank`: features of a key that are its
        value; None: values have their own memory.
        """
        self.recurrent, self.latent_rank = recurrent, latent_rank
        self.columns, self.device, self.page_size = columns, device, page_size
        of_head = columns + (SPARE_COLUMNS if device.type == "cpu" else 0)
        self._storage = zeros((layers, 2 if latent_rank is None else 1, kv_heads, of_head, head_dim), dtype, device)
        self.keys, self.values = list(self._storage[:, 0]), list(self._storage[:, -1, ..., :latent_rank])
        self._host_tables = np.zeros(tables, np.int32)
        self.tables = torch.from_numpy(self._host_tables)
        """Pages of each sequence, int32 [slots, pages], on the device. Other entries are stale pages."""
        self._unsent: list[tuple[int, Sequence[int]]] = []
        """Entries not yet on the device: index of the first entry, and the pages."""
        if device.type != "cpu":
            self.tables = self.tables.to(device)
        self.on_assign: Callable[[int, int, Sequence[int]], None] = lambda slot, first, pages: None
        """Called before every `assign` with its arguments."""

    @classmethod
    def of_one_sequence(
        cls,
        layers: int,
        kv_heads: int,
        columns: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
        latent_rank: int | None = None,
    ) -> Self:
        """Create an arena for one sequence, in slot 0, on a single page."""
        arena = cls(layers, kv_heads, columns, head_dim, dtype, device, (1, 1), columns, latent_rank=latent_rank)
        arena.assign(0, 0, [0])
        return arena

    def clear(self) -> None:
        """Forget all columns. On a CPU, they take no memory until they are used again."""
        return_pages(self._storage)
        if self.recurrent is not None:
            self.recurrent.clear()

    def assign(self, slot: int, first: int, pages: Sequence[int]) -> None:
        """Write pages into a slot's table, starting at entry `first`. `flush` sends them to the device."""
        self.on_assign(slot, first, pages)
        self._host_tables[slot, first : first + len(pages)] = pages
        if self.device.type != "cpu":
            self._unsent.append((slot * self._host_tables.shape[1] + first, pages))

    def flush(self) -> None:
        """Send new table entries to the device, ordered after the work already queued there."""
        if not self._unsent:
            return
        entries = [(first + i, page) for first, pages in self._unsent for i, page in enumerate(pages)]
        self._unsent.clear()
        latest = upload(torch.tensor([*dict(entries).items()]).T.contiguous(), self.device)
        self.tables.view(-1)[latest[0]] = latest[1].int()

    def columns_of(self, slot: int, first: int, count: int) -> list[int]:
        """Return the columns that hold `count` logical columns of a slot, starting at `first`."""
        size = self.page_size
        logical = np.arange(first, first + count)
        columns: list[int] = (self._host_tables[slot, logical // size] * size + logical % size).tolist()
        return columns

    def move(self, source: int, destination: int, count: int) -> None:
        """Copy `count` columns of all layers. The ranges may overlap."""
        for layer in self._storage:  # one layer at a time keeps the temporary copy small
            layer[..., destination : destination + count, :] = layer[..., source : source + count, :].clone()

    def write(self, layer: int, columns: torch.Tensor, key: torch.Tensor, value: torch.Tensor | None) -> None:
        """Store `key` and `value` [T, kv_heads, head_dim]; token t goes to column `columns[t]`.

        `value`: None if it is part of the key.
        """
        # Masked attention multiplies these columns by zero, and zero times an overflow is NaN.
        self.keys[layer][:, columns] = key.nan_to_num(0.0, 0.0, 0.0).transpose(0, 1)
        if value is not None:
            self.values[layer][:, columns] = value.nan_to_num(0.0, 0.0, 0.0).transpose(0, 1)
