"""New tokens of a sequence, and the columns of the arena where the sequence lies."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Span:
    """New tokens of one sequence: they take the positions from `start` on in `slot`."""

    slot: int
    start: int
    token_ids: Sequence[int]
    num_logits: int
    """How many of the last tokens have their logits computed."""

    @property
    def end(self) -> int:
        """Positions of the sequence once these tokens are cached."""
        return self.start + len(self.token_ids)


@dataclass(frozen=True)
class Location:
    """Columns of a sequence: its extent begins at column `origin` of the arena, position 0 is `start` columns later."""

    origin: int
    start: int = 0

    @property
    def first(self) -> int:
        """The column of position 0."""
        return self.origin + self.start
