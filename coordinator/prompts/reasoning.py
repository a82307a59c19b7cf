"""The tags of reasoning blocks, and whether a prompt ends within a block."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class ReasoningTags:
    """The texts and tokens around a model's reasoning."""

    begin: str
    end: str
    begin_ids: tuple[int, ...]
    end_ids: tuple[int, ...]
    answer_ids: tuple[int, ...] = ()
    """What the model writes between the end tag and the answer."""
    leading_ids: tuple[int, ...] = ()
    """Tokens of whitespace that may precede the begin tag."""

    def num_open(self, prompt_ids: Sequence[int]) -> int | None:
        """Return the number of prompt tokens within an open reasoning block; None without one."""
        newest_first = tuple(reversed(prompt_ids))
        begin, end = (_first(newest_first, ids[::-1]) for ids in (self.begin_ids, self.end_ids))
        return begin if begin is not None and (end is None or begin < end) else None


def _first(ids: tuple[int, ...], part: tuple[int, ...]) -> int | None:
    """Return the position of the first occurrence; None without one."""
    at = -1
    try:
        while True:
            at = ids.index(part[0], at + 1)
            if ids[at : at + len(part)] == part:
                return at
    except ValueError:
        return None
