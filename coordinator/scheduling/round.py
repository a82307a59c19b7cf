"""One round of one group: propose -> verify -> commit. Pure: builds requests to the workers and applies the responses.

The command is the same in every state: keep `base_length` cached positions, then append committed tokens. A new prompt,
a lagging draft worker and a lost cache differ only in the number of tokens to append. Long catch-ups are chunked, so
that they never stall decoding sequences.
"""

from collections.abc import Callable, Mapping
from collections.abc import Sequence as Items
from dataclasses import replace
from types import MappingProxyType

from coordinator.scheduling.commits import Commit, DraftPlan
from coordinator.scheduling.sequence import Sequence
from coordinator.scheduling.turn import PrefillBudget, Turn, known_tokens
from specpool.protocol.rounds import ItemStatus, Proposal, ProposeItem, Verdict, VerifyItem


class Round:
    """The turns of a group."""

    def __init__(
        self,
        round_id: int,
        group: Items[Sequence],
        prefill_tokens: int,
        plans: Mapping[int, DraftPlan] = MappingProxyType({}),
        chance: Callable[[float], float] = float,
    ) -> None:
        """`prefill_tokens`: budget of each worker for long catch-ups. `chance`: acceptance by draft probability.

        `plans`: by sequence id. Without a plan, the model drafts as many tokens as the request allows.
        """
        self.round_id = round_id
        self._prefill_tokens = prefill_tokens
        self._turns = {
            sequence.sequence_id: Turn(
                sequence, plans.get(sequence.sequence_id, DraftPlan(sequence.max_num_draft_tokens)), round_id, chance
            )
            for sequence in group
        }

    @property
    def cache_misses(self) -> int:
        return sum(turn.cache_misses for turn in self._turns.values())

    def propose_items(self, draft_max_len: int, draft_vocab_size: int) -> list[ProposeItem]:
        """Items for a draft worker with `draft_max_len` positions per sequence.

        Tokens drafted ahead are used only if every item has some. Otherwise the worker drafts for all sequences, which
        takes no longer and yields longer drafts.
        """
        budget = PrefillBudget(self._prefill_tokens)
        candidates = (turn.propose_item(budget, draft_max_len, draft_vocab_size) for turn in self._unfinished())
        items = [item for item in candidates if item is not None]
        turns = [(self._turns[item.sequence_id], item) for item in items]
        if not all(item.num_draft_tokens and turn.sequence.drafted_ahead for turn, item in turns):
            return items
        for turn, item in turns:
            turn.propose_drafted_ahead(item)
        return []

    def take_proposals(self, proposals: Items[Proposal], target_vocab_size: int) -> None:
        """Take the draft tokens before the first one outside the target's vocabulary."""
        for proposal in proposals:
            self._turns[proposal.sequence_id].take_proposal(proposal, target_vocab_size)

    def ahead_items(self, limit: int, draft_max_len: int) -> list[ProposeItem]:
        """Items to draft at most `limit` tokens ahead during the verification, assuming full acceptance.

        The first token of each guesses the bonus token.
        """
        candidates = (turn.ahead_item(limit, draft_max_len) for turn in self._unfinished())
        return [item for item in candidates if item is not None]

    def take_ahead(self, proposals: Items[Proposal], target_vocab_size: int) -> None:
        for proposal in proposals:
            if proposal.status is ItemStatus.OK:
                token_ids = known_tokens(proposal.draft_token_ids, target_vocab_size)
                self._turns[proposal.sequence_id].ahead = replace(proposal, draft_token_ids=token_ids)

    def verify_items(self) -> list[VerifyItem]:
        """Items for the target worker. Skips sequences aborted during the draft round."""
        budget = PrefillBudget(self._prefill_tokens)
        # New sequences last: one without a free slot would waste the budget of another.
        turns = sorted(self._unfinished(), key=lambda turn: turn.sequence.num_cached_tokens == 0)
        return [item for turn in turns if (item := turn.verify_item(budget)) is not None]

    def commit(self, verdicts: Items[Verdict]) -> list[Commit]:
        """Apply the verdicts. Return a commit for each sequence that gained tokens."""
        commits = (self._turns[verdict.sequence_id].take_verdict(verdict) for verdict in verdicts)
        return [commit for commit in commits if commit is not None]

    def _unfinished(self) -> list[Turn]:
        return [turn for turn in self._turns.values() if turn.sequence.finish is None]
