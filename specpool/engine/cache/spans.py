"""The new tokens of a sequence, and its location in the arena."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch


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
    states: torch.Tensor | None = None
    """Input of a feature draft: the target's states before the last tokens, [at most one per token, width]."""
    previous_state: torch.Tensor | None = None
    """Input of a feature draft: its own state before the first token, [hidden], unless `states` has the target's."""

    @property
    def end(self) -> int:
        """Length of the sequence once these tokens are cached."""
        return self.start + len(self.token_ids)

    def piece(self, begin: int, size: int) -> "Span":
        """The span of `size` of the tokens, with their logits and states."""
        end, count, states = min(begin + size, len(self.token_ids)), len(self.token_ids), self.states
        if states is not None:
            first = count - len(states)  # the first token with a state
            states = states[max(0, begin - first) : max(0, end - first)]
        return replace(
            self,
            start=self.start + begin,
            token_ids=self.token_ids[begin:end],
            num_logits=max(0, end - max(begin, count - self.num_logits)),
            states=states,
            previous_state=None if begin else self.previous_state,
        )


@dataclass(frozen=True)
class Location:
    """Location of a sequence: its extent begins at column `origin`, and position 0 is `start` columns later."""

    origin: int
    start: int = 0

    @property
    def first(self) -> int:
        return self.origin + self.start
