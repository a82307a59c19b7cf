"""The new tokens of a sequence, and its location in the arena."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Span:
    """New tokens of one sequence, at the positions from `start` on.

    The span of a branch continues the first `prefix_length` positions of the sequence, in columns that the sequence
    does not use. It starts at position `prefix_length` or later.
    """

    slot: int
    start: int
    token_ids: Sequence[int]
    num_logits: int  # number of trailing tokens that need logits
    prefix_length: int = 0
    offset: int = 0
    """Columns by which the positions from `prefix_length` on lie further right; 0: not a branch."""
    num_states: int = 0
    """Number of trailing tokens whose hidden states are needed."""

    @property
    def end(self) -> int:
        """Length of the sequence once these tokens are cached."""
        return self.start + len(self.token_ids)


@dataclass(frozen=True)
class Location:
    """Location of a sequence: its extent begins at column `origin`, and position 0 is `start` columns later."""

    origin: int
    start: int = 0

    @property
    def first(self) -> int:
        return self.origin + self.start
