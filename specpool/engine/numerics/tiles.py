"""Tiles: the shapes that make a row's result independent of its batch.

Floating-point sums depend on their order, a kernel's order depends on the shape it is called with, and a batch changes
shapes. So shapes are taken from a coarse grid: packed rows, query rows and attended length are padded to the multiples
that `specpool.engine.probes.batch_invariance` finds sufficient on the device at hand.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Tiles:
    """The grid of shapes. All ones means no padding, for a model whose logits may depend on the batch (a draft)."""

    min_rows: int = 1
    """Least number of packed rows in a forward pass."""
    row_multiple: int = 1
    """Packed rows in a forward pass are padded to a multiple of this."""
    query: int = 1
    """Query rows of each sequence are padded to a multiple of this; on an exact grid 1 means one row at a time."""
    kv: int = 1
    """Attended positions are padded to a multiple of this."""
    max_rows: int | None = None
    """Greatest number of packed rows in a forward pass; None: unlimited."""

    @property
    def exact(self) -> bool:
        """Whether shapes are restricted to a grid at all."""
        return self != Tiles()

    @property
    def by_row(self) -> bool:
        """Whether attention handles every query row separately, so that the number of other rows cannot matter."""
        return self.exact and self.query == 1

    def rows(self, count: int) -> int:
        """Number of packed rows, padding included, for `count` tokens."""
        return max(self.min_rows, round_up(count, self.row_multiple))


def coarsest(grids: Sequence[Tiles | None]) -> Tiles | None:
    """A grid whose shapes are on all of these grids; None if one of them is None."""
    known = [grid for grid in grids if grid is not None]
    if len(known) < len(grids):
        return None
    limits = [grid.max_rows for grid in known if grid.max_rows is not None]
    return Tiles(
        min_rows=max(grid.min_rows for grid in known),
        row_multiple=math.lcm(*(grid.row_multiple for grid in known)),
        query=math.lcm(*(grid.query for grid in known)),
        kv=math.lcm(*(grid.kv for grid in known)),
        max_rows=min(limits, default=None),
    )


def round_up(count: int, multiple: int) -> int:
    """The smallest multiple of `multiple` that is at least `count`."""
    return -(-count // multiple) * multiple
