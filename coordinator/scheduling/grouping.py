"""Grouping policies: who enters the window, and which ready sequences share the next round. Pure.

All give the same tokens. They differ in how often a worker with a padded batch has to realign it, and in how full the
batches are. `eqspec` and `exspec` are the methods of arXiv 2510.22876.
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
    """Sequences that play a round together."""

    sequences: list[Sequence]
    fallback: bool = False
    """The policy looked for sequences of the same length, and found too few."""

    @property
    def same_length(self) -> bool:
        """Whether they fit together without padding, in both workers."""
        return len({sequence.shape for sequence in self.sequences}) == 1


@dataclass(frozen=True)
class GroupingLimits:
    """What policies can be told."""

    max_batch_size: int
    min_group_size: int = 1
    """Fewer sequences of the same length are not worth a round of their own."""
    max_wait_rounds: int = 8
    """A sequence that waited for so many rounds is in the next."""
    prefer: Literal["largest", "oldest"] = "largest"
    """Of the groups of at least `min_group_size`: the one of most sequences, or of the one that waited longest."""


class Policy(Protocol):
    """A way to batch."""

    def __init__(self, limits: GroupingLimits) -> None: ...

    def places(self, running: Iterable[Sequence], leaving: int, free: int) -> int:
        """How many newcomers may enter a window of `free` places, beside those that run or are leaving."""

    def choose(self, ready: ReadySet, played: int) -> Group:
        """The sequences of the next round, after `played` rounds; none only if none is ready."""


class Ragged:
    """Any ready sequences, whatever their lengths: workers write in place, so nothing needs to fit together."""

    def __init__(self, limits: GroupingLimits) -> None:
        self._limits = limits

    def places(self, running: Iterable[Sequence], leaving: int, free: int) -> int:
        """All that are free."""
        return free

    def choose(self, ready: ReadySet, played: int) -> Group:
        """Those that waited longest."""
        return Group(list(islice(ready, self._limits.max_batch_size)))


class Eqspec:
    """Static batches: fixed at admission until all have finished, whatever their lengths."""

    def __init__(self, limits: GroupingLimits) -> None:
        self._limits = limits

    def places(self, running: Iterable[Sequence], leaving: int, free: int) -> int:
        """A batch is open until its first token, and the next one begins when all of it has left."""
        members = list(running)
        if (leaving and not members) or any(sequence.num_generated for sequence in members):
            return 0
        return min(free, self._limits.max_batch_size - len(members))

    def choose(self, ready: ReadySet, played: int) -> Group:
        """The whole batch: nobody else is in the window."""
        return Group(list(islice(ready, self._limits.max_batch_size)))


class Exspec:
    """Sequences of the same length, out of a window larger than the batch; if too few, those of about the same.

    Nobody starves: a mixed group has the oldest sequence in it, and one that waited too long is served first.
    """

    def __init__(self, limits: GroupingLimits) -> None:
        self._limits = limits

    def places(self, running: Iterable[Sequence], leaving: int, free: int) -> int:
        """All that are free."""
        return free

    def choose(self, ready: ReadySet, played: int) -> Group:
        """A group of the same length if one is large enough, else a mixed one."""
        if not ready:
            return Group([])
        limits, oldest = self._limits, ready.oldest
        enough = min(limits.min_group_size, len(ready))
        if played - oldest.ready_since >= limits.max_wait_rounds:
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
