"""Which draft worker has the cache of which sequence. Pure."""

from collections.abc import Iterable, Sequence
from typing import Generic, TypeVar

W = TypeVar("W")


class Placement(Generic[W]):
    """Sequences stay where they are placed. New ones go to the worker with the fewest."""

    def __init__(self) -> None:
        self._worker_of: dict[int, W] = {}
        self._counts: dict[W, int] = {}
        self._released: dict[int, W] = {}
        """Finished sequences, whose caches later ones may copy; the earliest first."""

    def worker_of(self, sequence_id: int) -> W | None:
        return self._worker_of.get(sequence_id)

    def count(self, worker: W) -> int:
        """Return the number of sequences on a worker."""
        return self._counts.get(worker, 0)

    def has_cached(self, worker: W, sequence_id: int) -> bool:
        """Whether the worker may still have the cache of a sequence, running or finished."""
        return self._worker_of.get(sequence_id, self._released.get(sequence_id)) is worker

    def place(self, sequence_id: int, workers: Sequence[W], source_id: int | None = None) -> W:
        """Place a new or removed sequence on the worker with the fewest sequences. Return the worker.

        `source_id`: the sequence whose cached prefix it copies. Its worker may have one sequence more than others.
        """

        def rank(worker: W) -> tuple[int, bool]:
            has_source = source_id is not None and self.has_cached(worker, source_id)
            return self.count(worker) - has_source, not has_source

        worker = min(workers, key=rank)
        self._worker_of[sequence_id] = worker
        self._counts[worker] = self.count(worker) + 1
        return worker

    def remove(self, sequence_id: int) -> W | None:
        """Remove a sequence from its worker, which loses the cache. Return the worker."""
        worker = self._worker_of.pop(sequence_id, None)
        if worker is not None:
            self._counts[worker] -= 1
        return worker

    def release(self, sequence_ids: Iterable[int], max_released: int) -> None:
        """Remove finished sequences, and remember where the last `max_released` are cached."""
        for sequence_id in sequence_ids:
            if (worker := self.remove(sequence_id)) is not None:
                self._released[sequence_id] = worker
        while len(self._released) > max_released:
            del self._released[next(iter(self._released))]

    def forget(self, worker: W) -> None:
        """Remove a worker and all its sequences."""
        self._counts.pop(worker, None)
        for placed in (self._worker_of, self._released):
            for sequence_id in [each for each, on in placed.items() if on is worker]:
                del placed[sequence_id]
