"""Per-sequence state of a target worker that carries a draft. Pure bookkeeping without torch."""

from dataclasses import dataclass
from typing import Any, NamedTuple


class KeptDraft(NamedTuple):
    """Draft tokens for a sequence with `base_length` cached positions, followed by the committed token `token_id`."""

    base_length: int
    token_id: int
    token_ids: tuple[int, ...] = ()
    confidences: tuple[float, ...] = ()
    """The draft's probability of each token, if requested."""

    def rest(self, gained: tuple[int, ...]) -> "KeptDraft | None":
        """Return the rest of the draft after a round gained these tokens; None if they differ or nothing is left."""
        count = len(gained)
        if not count or len(self.token_ids) <= count or self.token_ids[:count] != gained:
            return None
        return KeptDraft(self.base_length + count, gained[-1], self.token_ids[count:], self.confidences[count:])


@dataclass
class CarriedDraft:
    """The worker's own draft of a sequence, and how far the draft's cache agrees with the target's."""

    found: KeptDraft | None = None
    """The draft that the last round found. A repeated round finds it again."""
    made: KeptDraft | None = None
    """The draft for the next round."""
    num_agreed: int = 0
    """Leading positions with the same tokens in both caches, as long as the draft keeps its cache."""
    states: Any = None
    """The target's states that a feature draft has not read yet, [n, width]; None if there are none."""
    states_end: int = 0
    """The position after the last state."""

    def realign(self, base_length: int) -> None:
        """Forget everything after the first `base_length` positions."""
        self.found = self.made = None
        self.num_agreed = min(self.num_agreed, base_length)
        if count := self.num_states_from(base_length):
            self.states, self.states_end = self.states[:-count] if count < len(self.states) else None, base_length

    def num_states_from(self, position: int) -> int:
        """Return the number of states at or after this position."""
        return 0 if self.states is None else max(0, min(len(self.states), self.states_end - position))

    def find(self, base_length: int, token_ids: tuple[int, ...]) -> KeptDraft | None:
        """Return the draft that continues these positions and tokens, from after the last round or before it."""
        begins = base_length, token_ids[0] if len(token_ids) == 1 else None
        return next((draft for draft in (self.made, self.found) if draft is not None and draft[:2] == begins), None)
