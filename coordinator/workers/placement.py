"""Which draft worker has the cache of which sequence. Pure."""

from collections.abc import Hashable, Iterable, Sequence
from typing import Generic, TypeVar

W = TypeVar("W")

MAX_PREFIXES = 4096
"""Maximum number of prefixes to remember."""


class Placement(Generic[W]):
    """Sequences stay where they are placed. New ones go to the worker with the fewest."""

    def __init__(self) -> None:
        self._worker_of: dict[int, W] = {}
        self._counts: dict[W, int] = {}
        self._worker_by_prefix: dict[Hashable, W] = {}
        """Where the last sequence with a prefix was placed, least recently used first."""

    def worker_of(self, sequence_id: int) -> W | None:
        return self._worker_of.get(sequence_id)

    def count(self, worker: W) -> int:
        """Return the number of sequences on a worker."""
        return self._counts.get(worker, 0)

    def place(self, sequence_id: int, workers: Sequence[W], prefix: Hashable | None = None) -> W:
        """Place a new or removed sequence on the worker with the fewest sequences. Return the worker.

        `prefix`: identifies its first tokens. The worker that may have cached them may have one sequence more than
        others.
        """

        def rank(worker: W) -> tuple[int, bool]:
            has_prefix = prefix is not None and self._worker_by_prefix.get(prefix) is worker
            return self.count(worker) - has_prefix, not has_prefix

        worker = min(workers, key=rank)
        if prefix is not None:
            self._worker_by_prefix.pop(prefix, None)
            self._worker_by_prefix[prefix] = worker
            if len(self._worker_by_prefix) > MAX_PREFIXES:
                del self._worker_by_prefix[next(iter(self._worker_by_prefix))]
        self._worker_of[sequence_id] = worker
        self._counts[worker] = self.count(worker) + 1
        return worker

    def remove(self, sequence_id: int) -> W | None:
        """Remove a sequence from its worker, which loses the cache. Return the worker."""
        worker = self._worker_of.pop(sequence_id, None)
        if worker is not None:
            self._counts[worker] -= 1
        return worker

    def release(self, sequence_ids: Iterable[int]) -> None:
        """Remove finished sequences."""
        for sequence_id in sequence_ids:
            self.remove(sequence_id)

    def forget(self, worker: W) -> None:
        """Remove a worker and all its sequences."""
        self._counts.pop(worker, None)
        self._worker_of = {each: on for each, on in self._worker_of.items() if on is not worker}
        self._worker_by_prefix = {each: on for each, on in self._worker_by_prefix.items() if on is not worker}
