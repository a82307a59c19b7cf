"""Drafting: catch up with what was committed, then one forward pass for every further draft token of the batch."""

from collections.abc import Sequence
from dataclasses import dataclass

from engine.sequences import Extension, SequenceEngine
from engine.slots import Realignment


@dataclass(frozen=True)
class ProposeItem(Extension):
    """One sequence's part of a round."""

    num_draft_tokens: int = 0


@dataclass(frozen=True)
class Proposal:
    """`token_ids`: the draft tokens; empty unless realigned."""

    realignment: Realignment
    token_ids: list[int]
    cached_length: int


class Proposer(SequenceEngine):
    """The draft worker's backend."""

    def propose(self, coordinator_id: str, round_id: int, items: Sequence[ProposeItem]) -> list[Proposal]:
        """One proposal for each item, in their order."""
        realigned = self.realign(coordinator_id, round_id, items)
        ready = [item for item, state in zip(items, realigned, strict=True) if state is Realignment.OK]
        drafts: dict[int, list[int]] = {item.sequence_id: [] for item in ready}
        # The first pass appends what the draft has not seen; after a full acceptance this includes its own last token.
        feed = {item.sequence_id: item.token_ids for item in ready}
        drafting = ready
        while feed:
            self._advance(coordinator_id, drafting, feed, drafts)
            drafting = [item for item in drafting if len(drafts[item.sequence_id]) < item.num_draft_tokens]
            feed = {item.sequence_id: (drafts[item.sequence_id][-1],) for item in drafting}
        return [
            Proposal(state, drafts.get(item.sequence_id, []), self._cached_length(coordinator_id, item, state))
            for item, state in zip(items, realigned, strict=True)
        ]

    def _advance(
        self,
        coordinator_id: str,
        items: Sequence[ProposeItem],
        feed: dict[int, tuple[int, ...]],
        drafts: dict[int, list[int]],
    ) -> None:
        """Feeds every item its tokens, and adds the draft's choice to those that want one."""
        spans = {
            item.sequence_id: self.span(
                coordinator_id, item.sequence_id, feed[item.sequence_id], min(1, item.num_draft_tokens)
            )
            for item in items
        }
        for sequence_id, chosen in self.choose(coordinator_id, spans).items():
            self.keep(coordinator_id, sequence_id, spans[sequence_id].end)
            drafts[sequence_id].extend(chosen.token_ids)

    def _cached_length(self, coordinator_id: str, item: ProposeItem, state: Realignment) -> int:
        if state is not Realignment.OK:
            return 0
        return self.engine.slots[coordinator_id, item.sequence_id].cached_length
