"""Reasoning tags, and whether a prompt ends within a reasoning block."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class ReasoningTags:
    """The reasoning tags of a model, as strings and as token ids."""

    begin: str
    end: str
    begin_ids: tuple[int, ...]
    end_ids: tuple[int, ...]
    answer_ids: tuple[int, ...] = ()
    """Tokens that the model generates between the end tag and the answer."""
    leading_ids: tuple[int, ...] = ()
    """Whitespace tokens that may precede the begin tag."""

    def num_open(self, prompt_ids: Sequence[int]) -> int | None:
        """Return the number of prompt tokens in an open reasoning block, or None if none is open."""
        newest_first = tuple(reversed(prompt_ids))
        begin, end = (_first(newest_first, ids[::-1]) for ids in (self.begin_ids, self.end_ids))
        return begin if begin is not None and (end is None or begin < end) else None


def _first(ids: tuple[int, ...], part: tuple[int, ...]) -> int | None:
    """Return the position of the first occurrence of `part`, or None."""
    at = -1
    try:
        while True:
            at = ids.index(part[0], at + 1)
            if ids[at : at + len(part)] == part:
                return at
    except ValueError:
        return None
