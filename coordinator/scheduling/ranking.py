"""Priority queue with changing ranks. Pure."""

from collections.abc import Iterator
from heapq import heapify, heappop, heappush
from typing import Generic, TypeVar

Item = TypeVar("Item", int, str)
Rank = tuple[int, ...]

# Stale heap entries beyond one per item before the heap is rebuilt.
MAX_STALE = 16


class Ranking(Generic[Item]):
    """Finds the item with the lowest rank. Updates take logarithmic time."""

    def __init__(self) -> None:
        self._ranks: dict[Item, Rank] = {}
        self._heap: list[tuple[Rank, Item]] = []
        """Every item with its rank, and stale entries of items that left or changed their rank."""

    def __len__(self) -> int:
        return len(self._ranks)

    def __iter__(self) -> Iterator[Item]:
        """All items, in the order in which they were added."""
        return iter(self._ranks)

    @property
    def first(self) -> Item:
        """The item with the lowest rank. Raises IndexError if there is none."""
        while self._ranks.get(self._heap[0][1]) != self._heap[0][0]:
            heappop(self._heap)
        return self._heap[0][1]

    def put(self, item: Item, rank: Rank) -> None:
        """Add an item or change its rank."""
        if self._ranks.get(item) == rank:
            return
        self._ranks[item] = rank
        heappush(self._heap, (rank, item))
        if len(self._heap) > 2 * len(self._ranks) + MAX_STALE:
            self._heap = [(rank, item) for item, rank in self._ranks.items()]
            heapify(self._heap)

    def discard(self, item: Item) -> None:
        self._ranks.pop(item, None)
