"""Allocation of KV cache columns: each slot gets an extent, which grows with its sequence.

Pure bookkeeping, without torch.
"""

from collections.abc import Callable

from specpool.engine.numerics.tiles import round_up

Move = Callable[[int, int, int], None]  # (source, destination, count)


class Extents:
    """The extents of all slots. Columns move to close gaps only when an allocation needs the space."""

    def __init__(self, slots: int, max_length: int, columns: int | None = None, multiple: int = 1) -> None:
        """Create empty extents.

        `max_length`: columns of the longest extent. `columns`: columns of the cache; default: `max_length` per slot.
        `multiple`: lengths are rounded up to a multiple of this.
        """
        self.max_length, self.multiple = max_length, multiple
        self.columns = slots * max_length if columns is None else columns
        self.origins = [self._default_origin(slot) for slot in range(slots)]
        """First column of each slot's extent. A slot without one gets a column with `max_length` columns after it."""
        self._lengths: dict[int, int] = {}
        self.free = self.columns  # number of unallocated columns
        self.move: Move = lambda source, destination, count: None

    def capacity_for(self, length: int | None) -> int:
        """Return the columns needed for `length` positions; None: for the longest sequence."""
        return self.max_length if length is None else min(self.max_length, round_up(max(1, length), self.multiple))

    def length(self, slot: int) -> int:
        return self._lengths.get(slot, 0)

    def reserve(self, slot: int, columns: int) -> None:
        """Allocate an extent for a slot that has none. The caller checks that enough columns are free."""
        assert slot not in self._lengths
        assert columns <= self.free
        origin = self._gap(columns)
        if origin is None:
            self._make_room()
            origin = self._gap(columns)
            assert origin is not None
        self.origins[slot], self._lengths[slot] = origin, columns
        self.free -= columns

    def resize(self, slot: int, columns: int) -> None:
        """Change the length of an extent. The caller checks that enough columns are free.

        It grows in place if it can, otherwise in a gap. Other extents move only if no gap is large enough.
        """
        length = self._lengths[slot]
        assert columns - length <= self.free
        if self._room(slot) < columns:
            origin = self._gap(columns, excluding=slot)
            if origin is None:
                self._make_room(slot, columns)
            else:
                self.move(self.origins[slot], origin, length)
                self.origins[slot] = origin
        self._lengths[slot] = columns
        self.free -= columns - length

    def release(self, slot: int) -> None:
        self.free += self._lengths.pop(slot)
        self.origins[slot] = self._default_origin(slot)

    def _default_origin(self, slot: int) -> int:
        return min(slot * self.max_length, self.columns - self.max_length)

    def _gap(self, columns: int, excluding: int | None = None) -> int | None:
        """Return the start of the first gap with this many columns. `excluding`: treat this slot's extent as free."""
        at = 0
        for origin, length in self._in_order(excluding):
            if origin - at >= columns:
                return at
            at = origin + length
        return at if self.columns - at >= columns else None

    def _room(self, slot: int) -> int:
        """Columns from the start of an extent to the next one."""
        origin = self.origins[slot]
        return min((other for other, _ in self._in_order() if other > origin), default=self.columns) - origin

    def _make_room(self, slot: int | None = None, columns: int = 0) -> None:
        """Close all gaps, and leave `columns` from the start of this slot's extent to the next one."""
        at, targets = 0, {}
        for other in sorted(self._lengths, key=self.origins.__getitem__):
            targets[other] = at
            at += columns if other == slot else self._lengths[other]
        left = [other for other in targets if targets[other] < self.origins[other]]
        right = [other for other in reversed(targets) if targets[other] > self.origins[other]]
        for other in (*right, *left):  # no extent overwrites one that has yet to move
            self.move(self.origins[other], targets[other], self._lengths[other])
            self.origins[other] = targets[other]

    def _in_order(self, excluding: int | None = None) -> list[tuple[int, int]]:
        return sorted((self.origins[slot], length) for slot, length in self._lengths.items() if slot != excluding)

    def check_integrity(self) -> None:
        """Raise AssertionError if extents overlap or leave the cache, or the free columns are miscounted."""
        at = 0
        for origin, length in self._in_order():
            assert origin >= at, "extents overlap"
            at = origin + length
        assert at <= self.columns, "an extent leaves the cache"
        assert self.free == self.columns - sum(self._lengths.values()), "free columns are miscounted"
