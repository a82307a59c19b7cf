"""The new tokens of a sequence.

Every pass needs new spans. The class is not frozen: creating a frozen object takes three times as long.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch


@dataclass(slots=True)
class Span:
    """New tokens of one sequence, at the positions from `start` on.

    The span of a branch continues the first `prefix_length` positions of the sequence, in logical columns that the
    sequence does not use. It starts at position `prefix_length` or later.
    """

    slot: int
    start: int
    token_ids: Sequence[int]
    num_logits: int  # number of trailing tokens that need logits
    prefix_length: int = 0
    offset: int = 0
    """How many logical columns positions from `prefix_length` on are shifted to the right. 0: no branch."""
    num_states: int = 0
    """Number of trailing tokens whose hidden states are needed."""
    num_tentative: int = 0
    """Number of trailing tokens that the sequence may not keep, such as drafts."""
    states: torch.Tensor | None = None
    """Input of a feature draft: the target's states before the last tokens, [at most one per token, width]."""
    own_states: Mapping[int, torch.Tensor] | None = None
    """Input of a feature draft: its own state [hidden] before some tokens, by their index, if `states` has none."""

    @property
    def end(self) -> int:
        """Length of the sequence once these tokens are cached."""
        return self.start + len(self.token_ids)

    @property
    def columns(self) -> int:
        """Number of logical columns needed."""
        return self.end + self.offset

    def piece(self, begin: int, size: int) -> "Span":
        """The span of `size` of the tokens, with their logits and states."""
        end, count, states = min(begin + size, len(self.token_ids)), len(self.token_ids), self.states
        if states is not None:
            first = count - len(states)  # the first token with a state
            states = states[max(0, begin - first) : max(0, end - first)]
        own_states = self.own_states
        if own_states is not None:
            own_states = {index - begin: state for index, state in own_states.items() if begin <= index < end}
        return replace(
            self,
            start=self.start + begin,
            token_ids=self.token_ids[begin:end],
            num_logits=max(0, end - max(begin, count - self.num_logits)),
            states=states,
            own_states=own_states,
            num_states=max(0, end - max(begin, count - self.num_states)),
            num_tentative=max(0, end - max(begin, count - self.num_tentative)),
        )
