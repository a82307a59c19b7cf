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
from coordinator.scheduling.prefill import Catchup, share_prefill, timely_budget
from coordinator.scheduling.sequence import Sequence
from coordinator.scheduling.turn import Turn, known_tokens
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
        pass_seconds: Callable[[int], float] | None = None,
    ) -> None:
        """`prefill_tokens`: budget of each worker for long catch-ups. `chance`: acceptance by draft probability.

        `pass_seconds`: seconds of the target worker's pass by rows, which limit prefill; None: no limit.

        `plans`: by sequence id. Without a plan, the model drafts as many tokens as the request allows.
        """
        self.round_id = round_id
        self._prefill_tokens, self._pass_seconds = prefill_tokens, pass_seconds
        self._turns = {
            sequence.sequence_id: Turn(
                sequence, plans.get(sequence.sequence_id) or DraftPlan(sequence.max_num_draft_tokens), round_id, chance
            )
            for sequence in group
        }

    @property
    def cache_misses(self) -> int:
        return sum(turn.cache_misses for turn in self._turns.values())

    @property
    def wants_drafts(self) -> bool:
        """Whether the draft worker is to draft for a sequence, or to follow its prompt."""
        return any(turn.wants_drafts for turn in self._turns.values())

    def propose_items(self, draft_max_len: int, draft_vocab_size: int, draft_grows: bool = False) -> list[ProposeItem]:
        """Items for a draft worker with `draft_max_len` positions per sequence, whose reservations may grow.

        Tokens drafted ahead are used only if every item has some. Otherwise the worker drafts for all sequences, which
        takes no longer and yields longer drafts.
        """
        turns = self._unfinished()
        catchups = [(turn.sequence, count) for turn in turns if (count := turn.draft_catchup(draft_max_len))]
        shares = self._shares(catchups, num_draft_tokens=0)
        worker = draft_max_len, draft_vocab_size, draft_grows
        candidates = ((turn, turn.propose_item(shares.get(turn.sequence.sequence_id, 0), *worker)) for turn in turns)
        proposing = [(turn, item) for turn, item in candidates if item is not None]
        items = [item for _, item in proposing]
        if not all(item.num_draft_tokens and turn.sequence.drafted_ahead for turn, item in proposing):
            return items
        for turn, item in proposing:
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
        turns = self._unfinished()
        num_draft_tokens = sum(turn.num_draft_tokens for turn in turns)
        shares = self._shares([(turn.sequence, turn.catchup) for turn in turns], num_draft_tokens)
        for turn in turns:
            turn.sequence.prefill_waits = 0 if shares[turn.sequence.sequence_id] else turn.sequence.prefill_waits + 1
        return [turn.verify_item(count) for turn in turns if (count := shares[turn.sequence.sequence_id])]

    def complete_items(self) -> None:
        """Fill in where sequences continued, once their earlier rounds have committed."""
        for turn in self._turns.values():
            turn.complete_item()

    def discard(self) -> None:
        """Drop the round, and those that continue its sequences, after a failure."""
        for turn in self._turns.values():
            turn.discard()

    def commit(self, verdicts: Items[Verdict]) -> list[Commit]:
        """Apply the verdicts. Return a commit for each sequence that gained tokens."""
        commits = (self._turns[verdict.sequence_id].take_verdict(verdict) for verdict in verdicts)
        return [commit for commit in commits if commit is not None]

    def _shares(self, catchups: list[Catchup], num_draft_tokens: int) -> dict[int, int]:
        """Tokens of each sequence, by id, to send to a worker."""
        budget = self._prefill_tokens
        if self._pass_seconds is not None:
            budget = timely_budget(catchups, num_draft_tokens, budget, self._pass_seconds)
        return share_prefill(catchups, budget)

    def _unfinished(self) -> list[Turn]:
        return [turn for turn in self._turns.values() if turn.sequence.finish is None]
