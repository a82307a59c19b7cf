"""One round of one group: propose -> verify -> commit. Pure: builds requests to the workers and applies the responses.

The command is the same in every state: keep `base_length` cached positions, then append committed tokens. A new prompt,
a lagging draft worker and a lost cache differ only in the number of tokens to append. Long catch-ups are chunked, so
that they never stall decoding sequences.
"""

from collections.abc import Callable, Mapping
from collections.abc import Sequence as Items
from types import MappingProxyType

from coordinator.scheduling.commits import Commit
from coordinator.scheduling.features import limit_propose_items, limit_verify_items
from coordinator.scheduling.prefill import Catchup, share_prefill, timely_budget, with_short_background
from coordinator.scheduling.sequence import Sequence
from coordinator.scheduling.turn import DraftLimits, Turn
from specpool.drafting.plans import DraftPlan
from specpool.protocol.features import WantedFeatures
from specpool.protocol.rounds import Proposal, ProposeItem, Verdict, VerifyItem


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
        features: WantedFeatures | None = None,
    ) -> None:
        """`prefill_tokens`: budget of each worker for long catch-ups. `chance`: acceptance by draft probability.

        `pass_seconds`: seconds of the target worker's pass by rows, which limit prefill; None: no limit.

        `plans`: by sequence id. Without a plan, the model drafts as many tokens as the request allows. `features`:
        that the draft worker reads.
        """
        self.round_id, self.features = round_id, features
        self._prefill_tokens, self._pass_seconds = prefill_tokens, pass_seconds
        self._turns = {
            sequence.sequence_id: Turn(
                sequence,
                plans.get(sequence.sequence_id) or DraftPlan(sequence.max_num_draft_tokens),
                round_id,
                chance,
                features,
            )
            for sequence in group
        }

    @property
    def cache_misses(self) -> int:
        return sum(turn.cache_misses for turn in self._turns.values())

    @property
    def is_trial(self) -> bool:
        """Whether the round is a trial of its draft method."""
        return any(turn.is_trial for turn in self._turns.values())

    @property
    def wants_drafts(self) -> bool:
        """Whether the draft worker is to draft for a sequence, or to follow its prompt."""
        return any(turn.wants_drafts for turn in self._turns.values())

    @property
    def drafts_ahead(self) -> bool:
        """Whether the draft worker drafts during the verification, instead of before it."""
        return any(turn.drafts_ahead for turn in self._turns.values())

    def propose_items(self, worker: DraftLimits) -> list[ProposeItem]:
        """Items for the draft worker, to draft before the verification."""
        return self._draft_items(worker, Turn.propose_item)

    def ahead_items(self, worker: DraftLimits) -> list[ProposeItem]:
        """Items for the draft worker, to draft branches during the verification. Call after `verify_items`."""
        return self._draft_items(worker, Turn.ahead_item)

    def _draft_items(
        self, worker: DraftLimits, build: Callable[[Turn, int, DraftLimits], ProposeItem | None]
    ) -> list[ProposeItem]:
        turns = self._unfinished()
        missing = {turn: count for turn in turns if (count := turn.draft_catchup(worker.max_model_len))}
        # Tokens that are recomputed with their states are no prefill, which would wait for other sequences.
        catchups = [(turn.sequence, max(1, count - turn.sequence.draft_recompute)) for turn, count in missing.items()]
        shares = self._shares(catchups, num_draft_tokens=0)
        counts = {
            turn: min(missing[turn], share + turn.sequence.draft_recompute)
            for turn in missing
            if (share := shares.get(turn.sequence.sequence_id, 0))
        }
        built = (build(turn, counts.get(turn, 0), worker) for turn in turns)
        items = [item for item in built if item is not None]
        if self.features is not None:
            limit_propose_items(items)
        return items

    def take_branches(self, target_selects: bool = True) -> None:
        """Take the branches that match the last verification, or all while its outcome is unknown.

        No sequence waits for the drafts of another. `target_selects`: whether the target worker can select branches.
        """
        for turn in self._unfinished():
            turn.take_branches(target_selects)

    def take_proposals(self, proposals: Items[Proposal], target_vocab_size: int) -> None:
        """Take the draft tokens before the first one outside the target's vocabulary."""
        for proposal in proposals:
            self._turns[proposal.sequence_id].take_proposal(proposal, target_vocab_size)

    def take_ahead(self, proposals: Items[Proposal], target_vocab_size: int) -> None:
        """Take the branches drafted during the verification, before the round commits."""
        for proposal in proposals:
            self._turns[proposal.sequence_id].take_ahead(proposal, target_vocab_size)

    def verify_items(self) -> list[VerifyItem]:
        """Items for the target worker. Skips sequences aborted during the draft round."""
        turns = self._unfinished()
        num_draft_tokens = sum(turn.num_draft_tokens for turn in turns)
        shares = self._shares([(turn.sequence, turn.catchup) for turn in turns], num_draft_tokens)
        for turn in turns:
            turn.sequence.prefill_waits = 0 if shares[turn.sequence.sequence_id] else turn.sequence.prefill_waits + 1
        items = [turn.verify_item(count) for turn in turns if (count := shares[turn.sequence.sequence_id])]
        if self.features is not None:
            limit_verify_items(items, self.features)
        return items

    def complete_items(self) -> None:
        """Fill in position, last token and draft tokens of continued items, once the rounds before have committed."""
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

    def _shares(self, catchups: Items[Catchup], num_draft_tokens: int) -> dict[int, int]:
        """Tokens of each sequence, by id, to send to a worker."""
        budget, catchups = self._prefill_tokens, with_short_background(catchups)
        if self._pass_seconds is not None:
            budget = timely_budget(catchups, num_draft_tokens, budget, self._pass_seconds)
        return share_prefill(catchups, budget)

    def _unfinished(self) -> list[Turn]:
        return [turn for turn in self._turns.values() if turn.sequence.finish is None]
