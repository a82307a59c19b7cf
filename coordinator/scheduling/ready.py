"""Sequences that can join a round, oldest first and by shape. Pure."""

from collections.abc import Iterable, Iterator, Mapping
from itertools import islice

from coordinator.scheduling.sequence import Sequence, Shape


class ReadySet:
    """Ready sequences with an index by shape, so that policies examine few of them."""

    def __init__(self, sequences: Iterable[Sequence] = ()) -> None:
        self._by_id: dict[int, Sequence] = {}
        self._by_shape: dict[Shape, dict[int, Sequence]] = {}
        self._shapes: dict[int, Shape] = {}
        for sequence in sequences:
            self.add(sequence)

    def add(self, sequence: Sequence) -> None:
        """Append a sequence under its current shape."""
        shape = self._shapes[sequence.sequence_id] = sequence.shape
        self._by_id[sequence.sequence_id] = sequence
        self._by_shape.setdefault(shape, {})[sequence.sequence_id] = sequence

    def pop(self, sequence_id: int) -> Sequence:
        """Remove a sequence. Raises KeyError if it is not ready."""
        sequence, shape = self._by_id.pop(sequence_id), self._shapes.pop(sequence_id)
        same_shape = self._by_shape[shape]
        del same_shape[sequence_id]
        if not same_shape:
            del self._by_shape[shape]
        return sequence

    def __contains__(self, sequence_id: int) -> bool:
        return sequence_id in self._by_id

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._by_id.values())

    def __len__(self) -> int:
        return len(self._by_id)

    @property
    def oldest(self) -> Sequence:
        return next(iter(self))

    @property
    def by_shape(self) -> Mapping[Shape, Mapping[int, Sequence]]:
        """Sequences of equal shape by id, oldest first."""
        return self._by_shape

    def count_same_shape(self, sequence: Sequence) -> int:
        """Number of sequences with the shape of this one, including itself."""
        return len(self._by_shape[self._shapes[sequence.sequence_id]])

    def same_shape(self, sequence: Sequence, limit: int) -> list[Sequence]:
        """The oldest sequences with the shape of this one, at most `limit`."""
        return list(islice(self._by_shape[self._shapes[sequence.sequence_id]].values(), limit))
