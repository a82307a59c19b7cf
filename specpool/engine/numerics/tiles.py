"""Tile sizes that make a forward pass batch-invariant.

Floating-point sums depend on their order, kernels choose the order by shape, and a batch changes the shapes. Padding to
tiles limits the shapes to a few. `specpool.engine.probes.batch_invariance` finds the tiles that a device needs.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Tiles:
    """Padding multiples of one forward pass. The default pads nothing, for models that need no batch invariance."""

    min_rows: int = 1  # minimum number of packed rows
    row_multiple: int = 1  # multiple of packed rows
    query: int = 1  # multiple of each sequence's query rows; 1 in a batch-invariant pass means one row at a time
    kv: int = 1  # multiple of attended positions
    max_rows: int | None = None  # maximum number of packed rows; None: unlimited

    @property
    def exact(self) -> bool:
        """Whether the pass is padded for batch invariance."""
        return self != Tiles()

    @property
    def by_row(self) -> bool:
        """Whether attention computes every query row on its own, so that other rows cannot matter."""
        return self.exact and self.query == 1

    def rows(self, count: int) -> int:
        """Return the number of packed rows for `count` tokens, padding included."""
        return max(self.min_rows, round_up(count, self.row_multiple))


def common_tiles(candidates: Sequence[Tiles | None]) -> Tiles | None:
    """Return tiles that satisfy all candidates, or None if one of them is None."""
    known = [tiles for tiles in candidates if tiles is not None]
    if len(known) < len(candidates):
        return None
    return Tiles(
        min_rows=max(tiles.min_rows for tiles in known),
        row_multiple=math.lcm(*(tiles.row_multiple for tiles in known)),
        query=math.lcm(*(tiles.query for tiles in known)),
        kv=math.lcm(*(tiles.kv for tiles in known)),
        max_rows=min((tiles.max_rows for tiles in known if tiles.max_rows is not None), default=None),
    )


def round_up(count: int, multiple: int) -> int:
    """Return the smallest multiple of `multiple` that is at least `count`."""
    return -(-count // multiple) * multiple
