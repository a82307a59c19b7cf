"""Branches of a sequence: alternative continuations of its first positions, in the same extent."""

from collections.abc import Sequence
from dataclasses import dataclass

from specpool.engine.cache.slots import SequenceKey, Slot
from specpool.engine.cache.spans import Span
from specpool.engine.passes.drafts import Draft
from specpool.engine.sampling.rows import SequenceRows


@dataclass(frozen=True)
class Branch:
    """A continuation of a sequence's first `prefix_length` tokens, which must be cached or run in the same pass.

    With an offset of 0, it overwrites the sequence's own later positions.
    """

    key: SequenceKey
    prefix_length: int
    offset: int
    """Columns by which the branch is further right than the same positions of the sequence itself."""
    token_ids: Sequence[int]
    """All tokens of the branch so far."""
    num_cached_tokens: int = 0
    """Leading tokens of the branch that are cached."""
    num_logits: int = 1
    """Number of trailing tokens that need logits. All but the first of them are a draft."""

    def span(self, slot: Slot) -> Span:
        """The span of the tokens that are not cached yet. `slot`: of the sequence."""
        start, token_ids = self.prefix_length + self.num_cached_tokens, self.token_ids[self.num_cached_tokens :]
        own_states = {0: slot.own_states[start]} if start in slot.own_states else None
        span = Span(
            slot.index, start, token_ids, self.num_logits, self.prefix_length, self.offset, own_states=own_states
        )
        assert span.end + span.offset <= slot.capacity, "a branch leaves the extent of its sequence"
        return span

    def rows(self, slot: Slot) -> SequenceRows:
        """The rows of logits after the last tokens. `slot`: of the sequence."""
        assert self.prefix_length <= len(slot.token_ids)
        token_ids = [*slot.token_ids[: self.prefix_length], *self.token_ids]
        return SequenceRows(slot.sampling, token_ids, self.num_logits, prefix_length=self.prefix_length)

    def draft(self, slot: Slot, num_draft_tokens: int, needs_confidences: bool) -> Draft:
        """A draft that continues the branch. `slot`: of the sequence."""
        rows = self.rows(slot)
        return Draft(
            self.span(slot),
            rows.rules,
            [*rows.token_ids],
            num_draft_tokens,
            prefix_length=self.prefix_length,
            needs_confidences=needs_confidences,
        )
