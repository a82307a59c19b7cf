"""Grouping policies: how many sequences enter the window, and which of them share the next round. Pure.

All policies give the same tokens. They differ in batch size, and in how often a padded batch must be realigned.
`eqspec` and `exspec` come from arXiv 2510.22876.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from heapq import nsmallest
from itertools import chain, islice
from typing import Literal, Protocol

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


@dataclass(frozen=True)
class Group:
    """Sequences that share a round."""

    sequences: list[Sequence]
    fallback: bool = False
    """The policy found too few sequences of the same length."""

    @property
    def same_length(self) -> bool:
        """Whether the sequences need no padding, in either worker."""
        return len({sequence.shape for sequence in self.sequences}) == 1


@dataclass(frozen=True)
class GroupingLimits:
    """Limits of a policy."""

    max_batch_size: int
    min_group_size: int = 1
    """Minimum size of an equal-length group."""
    max_wait_rounds: int = 8
    """Maximum rounds that a ready sequence waits before it joins the next one."""
    prefer: Literal["largest", "oldest"] = "largest"
    """Which of several equal-length groups goes first."""


class Policy(Protocol):
    """A batching policy."""

    runs_ahead: bool
    """Whether a group may begin its next round before its lengths are known."""

    def __init__(self, limits: GroupingLimits) -> None: ...

    def admissible(self, members: Iterable[Sequence], leaving: int, capacity: int) -> int:
        """Number of sequences that may enter the window. `leaving`: sequences that still hold a slot."""

    def choose(self, ready: ReadySet, rounds: int) -> Group:
        """The group of the next round, after `rounds` rounds; empty only if nothing is ready."""


class Ragged:
    """Batches the sequences that have waited longest. Lengths may differ, because workers write in place."""

    runs_ahead = True

    def __init__(self, limits: GroupingLimits) -> None:
        self._limits = limits

    def admissible(self, members: Iterable[Sequence], leaving: int, capacity: int) -> int:
        return capacity

    def choose(self, ready: ReadySet, rounds: int) -> Group:
        return Group(list(islice(ready, self._limits.max_batch_size)))


class Eqspec(Ragged):
    """Static batching: a batch stays fixed from admission until all of its sequences have finished."""

    runs_ahead = False

    def admissible(self, members: Iterable[Sequence], leaving: int, capacity: int) -> int:
        """A batch admits sequences until its first token; the next batch begins once all have left."""
        batch = list(members)
        if (leaving and not batch) or any(sequence.num_generated for sequence in batch):
            return 0
        return min(capacity, self._limits.max_batch_size - len(batch))


class Exspec(Ragged):
    """Batches sequences of equal length from a window larger than the batch. Falls back to similar lengths.

    No sequence starves: mixed groups contain the oldest sequence, and a sequence that has waited too long goes first.
    """

    runs_ahead = False

    def choose(self, ready: ReadySet, rounds: int) -> Group:
        """An equal-length group if one is large enough, otherwise a mixed one."""
        if not ready:
            return Group([])
        limits, oldest = self._limits, ready.oldest
        min_size = min(limits.min_group_size, len(ready))
        if rounds - oldest.ready_since >= limits.max_wait_rounds:
            group = ready.same_shape(oldest, limits.max_batch_size)
        elif limits.prefer == "largest":
            group = list(islice(max(ready.by_shape.values(), key=len).values(), limits.max_batch_size))
        else:
            candidates = (sequence for sequence in ready if ready.count_same_shape(sequence) >= min_size)
            group = ready.same_shape(next(candidates, oldest), limits.max_batch_size)
        if len(group) >= min_size:
            return Group(group)
        return Group(self._nearest(ready, oldest), fallback=True)

    def _nearest(self, ready: ReadySet, oldest: Sequence) -> list[Sequence]:
        """The oldest sequence and the nearest in length: little padding now, equal lengths soon."""
        length, limit = len(oldest.token_ids), self._limits.max_batch_size
        shapes = nsmallest(limit, ready.by_shape, key=lambda shape: abs(shape[0] - length))
        others = chain.from_iterable(ready.by_shape[shape].values() for shape in shapes)
        return [oldest, *islice((sequence for sequence in others if sequence is not oldest), limit - 1)]


POLICIES: dict[str, type[Policy]] = {"ragged": Ragged, "exspec": Exspec, "eqspec": Eqspec}
