"""Allocation of the columns of the KV cache: each slot has an extent as long as its sequence can become.

Pure bookkeeping, without torch.
"""

from collections.abc import Callable

from specpool.engine.numerics.tiles import round_up

Move = Callable[[int, int, int], None]
"""Copies columns: (source, destination, count)."""


class Extents:
    """The extents of all slots. Gaps between them are closed, by moving columns, only when the space is needed."""

    def __init__(self, slots: int, longest: int, columns: int | None = None, multiple: int = 1) -> None:
        """`longest`: columns of an extent for a sequence of full length. `columns`: columns of the whole cache; by
        default every slot can have the longest extent. Lengths are multiples of `multiple`, and at most `longest`."""
        self.longest, self.multiple = longest, multiple
        self.columns = slots * longest if columns is None else columns
        self.origins = [self._default_origin(slot) for slot in range(slots)]
        """The first column of each slot's extent. For a slot without one, a column behind which any sequence fits."""
        self._lengths: dict[int, int] = {}
        self.free = self.columns
        """Number of columns that belong to no extent."""
        self.move: Move = lambda source, destination, count: None

    def capacity_for(self, length: int | None) -> int:
        """Columns of an extent for `length` positions; None: for as many positions as a sequence can have."""
        return self.longest if length is None else min(self.longest, round_up(max(1, length), self.multiple))

    def length(self, slot: int) -> int:
        """Number of columns of the slot's extent; 0 if it has none."""
        return self._lengths.get(slot, 0)

    def reserve(self, slot: int, columns: int) -> None:
        """Gives a slot without an extent one of `columns` columns, which must be free."""
        assert slot not in self._lengths
        assert columns <= self.free
        origin = self._gap(columns)
        if origin is None:
            self._close_gaps()
            origin = self._gap(columns)
            assert origin is not None
        self.origins[slot], self._lengths[slot] = origin, columns
        self.free -= columns

    def resize(self, slot: int, columns: int) -> bool:
        """Changes the length of an extent without moving any other, keeping what fits. False if it cannot grow."""
        before, length = self.origins[slot], self._lengths[slot]
        if columns > length:
            origin = self._gap(columns, excluding=slot)
            if origin is None:
                return False
            self.move(before, origin, length)
            self.origins[slot] = origin
        self._lengths[slot] = columns
        self.free -= columns - length
        return True

    def release(self, slot: int) -> None:
        """Frees the slot's extent."""
        self.free += self._lengths.pop(slot)
        self.origins[slot] = self._default_origin(slot)

    def _default_origin(self, slot: int) -> int:
        return min(slot * self.longest, self.columns - self.longest)

    def _gap(self, columns: int, excluding: int | None = None) -> int | None:
        """The first column of the first gap of this size or larger. `excluding`: a slot whose extent counts as free."""
        at = 0
        for origin, length in self._in_order(excluding):
            if origin - at >= columns:
                return at
            at = origin + length
        return at if self.columns - at >= columns else None

    def _close_gaps(self) -> None:
        at = 0
        for slot in sorted(self._lengths, key=self.origins.__getitem__):
            if self.origins[slot] != at:
                self.move(self.origins[slot], at, self._lengths[slot])
                self.origins[slot] = at
            at += self._lengths[slot]

    def _in_order(self, excluding: int | None = None) -> list[tuple[int, int]]:
        return sorted((self.origins[slot], length) for slot, length in self._lengths.items() if slot != excluding)

    def check_integrity(self) -> None:
        """Raises AssertionError if two extents overlap, one leaves the cache, or the free columns are miscounted."""
        at = 0
        for origin, length in self._in_order():
            assert origin >= at, "extents overlap"
            at = origin + length
        assert at <= self.columns, "an extent leaves the cache"
        assert self.free == self.columns - sum(self._lengths.values()), "free columns are miscounted"
