"""One round of one group: propose -> verify -> commit. Pure: says what to ask the workers, takes in what they answer.

The protocol is the same in every state: a worker is told how many cached positions to keep and which committed tokens
follow. A newcomer's prompt, a draft that missed rounds, and a worker that lost its cache differ only in the number of
those tokens. Long catch-ups are cut into chunks, so that the sequences that decode beside them never wait long.
"""

from collections.abc import Callable, Mapping
from collections.abc import Sequence as Items
from dataclasses import replace
from types import MappingProxyType

from coordinator.scheduling.commits import Commit, DraftOrder
from coordinator.scheduling.sequence import Sequence
from coordinator.scheduling.turn import PrefillBudget, Turn, known
from specpool.protocol.rounds import ItemStatus, Proposal, ProposeItem, Verdict, VerifyItem


class Round:
    """The turns of a group. `prefill_tokens`: the budget of each worker for tokens of long catch-ups."""

    def __init__(
        self,
        round_id: int,
        group: Items[Sequence],
        prefill_tokens: int,
        orders: Mapping[int, DraftOrder] = MappingProxyType({}),
        chance: Callable[[float], float] = float,
    ) -> None:
        """`orders`: by sequence id; without one, the model drafts as many tokens as the request allows.
        `chance`: the chance that a draft token is accepted, given the draft's own probability of it."""
        self.round_id = round_id
        self._prefill_tokens = prefill_tokens
        self._turns = {
            sequence.sequence_id: Turn(
                sequence, orders.get(sequence.sequence_id, DraftOrder(sequence.max_num_draft_tokens)), round_id, chance
            )
            for sequence in group
        }

    @property
    def cache_misses(self) -> int:
        """Caches that the workers have lost and that must be rebuilt."""
        return sum(turn.cache_misses for turn in self._turns.values())

    def propose_items(self, draft_max_len: int, draft_vocab_size: int) -> list[ProposeItem]:
        """The items for the draft worker, whose sequences can have `draft_max_len` positions; possibly none.

        Tokens that were drafted ahead are used only if they answer all items: otherwise the worker is asked for
        every sequence, which takes no longer and gives longer drafts.
        """
        budget = PrefillBudget(self._prefill_tokens)
        asked = (turn.propose_item(budget, draft_max_len, draft_vocab_size) for turn in self._unfinished())
        items = [item for item in asked if item is not None]
        if not all(item.num_draft_tokens and self._sequence(item).drafted_ahead for item in items):
            return items
        for item in items:
            self._turns[item.sequence_id].propose_drafted_ahead(item)
        return []

    def take_proposals(self, proposals: Items[Proposal], target_vocab_size: int) -> None:
        """Notes drafts and what the draft worker has cached. The target is never sent tokens that it does not know."""
        for proposal in proposals:
            self._turns[proposal.sequence_id].take_proposal(proposal, target_vocab_size)

    def ahead_items(self, most: int, draft_max_len: int) -> list[ProposeItem]:
        """The items for the draft worker while its proposals are verified, as if all of them were accepted: at most
        `most` further tokens each, of which the first is a guess at the bonus token. Possibly none."""
        asked = (turn.ahead_item(most, draft_max_len) for turn in self._unfinished())
        return [item for item in asked if item is not None]

    def take_ahead(self, proposals: Items[Proposal], target_vocab_size: int) -> None:
        """Notes what was drafted while proposals were verified."""
        for proposal in proposals:
            if proposal.status is ItemStatus.OK:
                token_ids = known(proposal.draft_token_ids, target_vocab_size)
                self._turns[proposal.sequence_id].take_ahead(replace(proposal, draft_token_ids=token_ids))

    def verify_items(self) -> list[VerifyItem]:
        """The items for the target worker; sequences that were aborted meanwhile are left out."""
        budget = PrefillBudget(self._prefill_tokens)
        # Newcomers last: one that gets no slot must not use up the budget of one that has a slot and could finish.
        turns = sorted(self._unfinished(), key=lambda turn: turn.sequence.num_cached_tokens == 0)
        return [item for turn in turns if (item := turn.verify_item(budget)) is not None]

    def commit(self, verdicts: Items[Verdict]) -> list[Commit]:
        """Takes in the verdicts; returns what each sequence gained, nothing for those that only prefilled."""
        commits = (self._turns[verdict.sequence_id].take_verdict(verdict) for verdict in verdicts)
        return [commit for commit in commits if commit is not None]

    def _sequence(self, item: ProposeItem) -> Sequence:
        return self._turns[item.sequence_id].sequence

    def _unfinished(self) -> list[Turn]:
        return [turn for turn in self._turns.values() if turn.sequence.finish is None]
