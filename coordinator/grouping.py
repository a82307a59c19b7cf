"""Grouping policies: which ready sequences share the next round. Pure functions of the pool's state."""

from collections.abc import Callable, Iterable
from itertools import islice

from coordinator.sequence import Sequence

GroupingPolicy = Callable[[Iterable[Sequence], int], list[Sequence]]
"""(ready sequences, longest without a round first; most that a group may have) -> the group"""


def ragged(ready: Iterable[Sequence], limit: int) -> list[Sequence]:
    """Any ready sequences, whatever their lengths: workers write in place, so nothing needs to fit together."""
    return list(islice(ready, limit))


POLICIES: dict[str, GroupingPolicy] = {"ragged": ragged}
