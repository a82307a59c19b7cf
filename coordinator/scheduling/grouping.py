"""Grouping policies: how many sequences enter the window, and which ready ones share the next round. Pure.

All policies give the same tokens. They differ in how often a worker with a padded batch has to realign it, and in how
full the batches are. `eqspec` and `exspec` are the methods of arXiv 2510.22876.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from heapq import nsmallest
from itertools import chain, islice
from typing import Literal, Protocol

from coordinator.scheduling.ready import ReadySet
from coordinator.scheduling.sequence import Sequence


@dataclass(frozen=True)
class Group:
    """Sequences that are in a round together."""

    sequences: list[Sequence]
    fallback: bool = False
    """The policy looked for sequences of the same length, and found too few."""

    @property
    def same_length(self) -> bool:
        """Whether they fit together without padding, in both workers."""
        return len({sequence.shape for sequence in self.sequences}) == 1


@dataclass(frozen=True)
class GroupingLimits:
    """Limits that policies keep."""

    max_batch_size: int
    min_group_size: int = 1
    """The least number of sequences of the same length that are worth a round of their own."""
    max_wait_rounds: int = 8
    """Rounds after which a waiting sequence is in the next one."""
    prefer: Literal["largest", "oldest"] = "largest"
    """Which group of at least `min_group_size` comes first: the largest, or that of the oldest sequence."""


class Policy(Protocol):
    """A way to batch."""

    def __init__(self, limits: GroupingLimits) -> None: ...

    def admissible(self, members: Iterable[Sequence], leaving: int, capacity: int) -> int:
        """The number of newcomers that may enter a window with this capacity left, beside its members and the leaving
        sequences."""

    def choose(self, ready: ReadySet, rounds: int) -> Group:
        """The group of the next round, after this number of rounds; empty only if no sequence is ready."""


class Ragged:
    """Any ready sequences, whatever their lengths: workers write in place, so nothing needs to fit together."""

    def __init__(self, limits: GroupingLimits) -> None:
        self._limits = limits

    def admissible(self, members: Iterable[Sequence], leaving: int, capacity: int) -> int:
        """The whole capacity."""
        return capacity

    def choose(self, ready: ReadySet, rounds: int) -> Group:
        """The sequences that waited longest."""
        return Group(list(islice(ready, self._limits.max_batch_size)))


class Eqspec:
    """Static batches: fixed at admission until all have finished, whatever their lengths."""

    def __init__(self, limits: GroupingLimits) -> None:
        self._limits = limits

    def admissible(self, members: Iterable[Sequence], leaving: int, capacity: int) -> int:
        """A batch is open until its first token, and the next one begins when all of it has left."""
        batch = list(members)
        if (leaving and not batch) or any(sequence.num_generated for sequence in batch):
            return 0
        return min(capacity, self._limits.max_batch_size - len(batch))

    def choose(self, ready: ReadySet, rounds: int) -> Group:
        """The whole batch: no other sequence is in the window."""
        return Group(list(islice(ready, self._limits.max_batch_size)))


class Exspec:
    """Sequences of the same length, out of a window larger than the batch; if too few, of about the same length.

    No sequence starves: a mixed group has the oldest one in it, and one that waited too long is served first.
    """

    def __init__(self, limits: GroupingLimits) -> None:
        self._limits = limits

    def admissible(self, members: Iterable[Sequence], leaving: int, capacity: int) -> int:
        """The whole capacity."""
        return capacity

    def choose(self, ready: ReadySet, rounds: int) -> Group:
        """A group of the same length if one is large enough, else a mixed one."""
        if not ready:
            return Group([])
        limits, oldest = self._limits, ready.oldest
        enough = min(limits.min_group_size, len(ready))
        if rounds - oldest.ready_since >= limits.max_wait_rounds:
            group = ready.alike(oldest, limits.max_batch_size)
        elif limits.prefer == "largest":
            group = list(islice(max(ready.by_shape.values(), key=len).values(), limits.max_batch_size))
        else:
            candidates = (sequence for sequence in ready if ready.number_alike(sequence) >= enough)
            group = ready.alike(next(candidates, oldest), limits.max_batch_size)
        if len(group) >= enough:
            return Group(group)
        return Group(self._nearest(ready, oldest), fallback=True)

    def _nearest(self, ready: ReadySet, oldest: Sequence) -> list[Sequence]:
        """The oldest sequence and those nearest to it in length: little padding now, equal lengths soon."""
        length, limit = len(oldest.token_ids), self._limits.max_batch_size
        shapes = nsmallest(limit, ready.by_shape, key=lambda shape: abs(shape[0] - length))
        others = chain.from_iterable(ready.by_shape[shape].values() for shape in shapes)
        return [oldest, *islice((sequence for sequence in others if sequence is not oldest), limit - 1)]


POLICIES: dict[str, type[Policy]] = {"ragged": Ragged, "exspec": Exspec, "eqspec": Eqspec}
