"""The shapes that make a row's result independent of its batch.

Floating-point sums depend on their order, a kernel's order depends on the shape it is called with, and a batch changes
shapes. So shapes are taken from a coarse grid: packed rows, query rows and attended length are padded to what
`engine.probes.exactness` finds to be enough on the device at hand.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Tiles:
    """The grid. All ones: no padding, for a model whose choices need not be reproducible (a draft)."""

    min_rows: int = 1
    """Packed rows of a forward pass, at least."""
    row_multiple: int = 1
    """Packed rows of a forward pass are a multiple of this."""
    query: int = 1
    """Query rows of each sequence in attention are a multiple of this; on an exact grid 1 means one row at a time."""
    kv: int = 1
    """Attended positions are a multiple of this."""
    max_rows: int | None = None
    """Packed rows of a forward pass, at most; None: any number."""

    @property
    def exact(self) -> bool:
        """Whether shapes are kept to a grid at all."""
        return self != Tiles()

    @property
    def by_row(self) -> bool:
        """Whether every query row is attended by itself, so that the number of others cannot matter."""
        return self.exact and self.query == 1

    def rows(self, count: int) -> int:
        """Packed rows to compute for `count` tokens."""
        return max(self.min_rows, round_up(count, self.row_multiple))


def round_up(count: int, multiple: int) -> int:
    """The smallest multiple of `multiple` that is at least `count`."""
    return -(-count // multiple) * multiple
