"""Who has which columns of the KV cache: every slot an extent as long as its sequence can become. Pure bookkeeping."""

from collections.abc import Callable

from engine.numerics import round_up

Move = Callable[[int, int, int], None]
"""Copies columns: from, to, how many."""


class Extents:
    """Extents of different lengths leave gaps behind; they are closed, by moving what is cached, when one is needed."""

    def __init__(self, slots: int, longest: int, columns: int | None = None, multiple: int = 1) -> None:
        """`longest`: columns of a sequence of full length; `columns`: of all, by default enough for such in every slot.
        Extents are multiples of `multiple` long, but never longer than `longest`."""
        self.longest, self.multiple = longest, multiple
        self.columns = slots * longest if columns is None else columns
        self.origins = [self._place(slot) for slot in range(slots)]
        """The first column of each slot. Of slots without an extent it is some place where a sequence fits."""
        self._lengths: dict[int, int] = {}
        self.move: Move = lambda source, destination, count: None

    @property
    def free(self) -> int:
        """Columns in nobody's extent."""
        return self.columns - sum(self._lengths.values())

    def room_for(self, length: int | None) -> int:
        """Columns of an extent for so many positions; None: as many as a sequence can have."""
        return self.longest if length is None else min(self.longest, round_up(max(1, length), self.multiple))

    def length(self, slot: int) -> int:
        """Columns of the slot's extent; 0 if it has none."""
        return self._lengths.get(slot, 0)

    def reserve(self, slot: int, columns: int) -> None:
        """Gives a slot without an extent one of so many columns, of those that are free."""
        assert slot not in self._lengths
        assert columns <= self.free
        origin = self._gap(columns)
        if origin is None:
            self._close_gaps()
            origin = self._gap(columns)
            assert origin is not None
        self.origins[slot], self._lengths[slot] = origin, columns

    def resize(self, slot: int, columns: int) -> bool:
        """Makes an extent so long without moving any other; False if that cannot be. What fits is kept."""
        before, length = self.origins[slot], self._lengths[slot]
        if columns > length:
            origin = self._gap(columns, but_for=slot)
            if origin is None:
                return False
            self.move(before, origin, length)
            self.origins[slot] = origin
        self._lengths[slot] = columns
        return True

    def release(self, slot: int) -> None:
        """Takes the slot's extent back."""
        del self._lengths[slot]
        self.origins[slot] = self._place(slot)

    def _place(self, slot: int) -> int:
        return min(slot * self.longest, self.columns - self.longest)

    def _gap(self, columns: int, but_for: int | None = None) -> int | None:
        """The first place that is free for so many, or would be without a slot."""
        at = 0
        for origin, length in self._in_order(but_for):
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

    def _in_order(self, but_for: int | None = None) -> list[tuple[int, int]]:
        return sorted((self.origins[slot], length) for slot, length in self._lengths.items() if slot != but_for)

    def check_integrity(self) -> None:
        """Raises AssertionError if two extents overlap, or one leaves the cache."""
        at = 0
        for origin, length in self._in_order():
            assert origin >= at, "extents overlap"
            at = origin + length
        assert at <= self.columns, "an extent leaves the cache"
