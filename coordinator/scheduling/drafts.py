"""A sequence's drafts in a round: the draft model's answer, and which of its tokens to verify. Pure."""

from collections.abc import Callable

from coordinator.scheduling.caches import PendingRound
from coordinator.scheduling.draft_items import DraftItems
from coordinator.scheduling.sequence import Sequence
from specpool.drafting.acceptance import agreement_length, known_tokens, likely_tokens
from specpool.drafting.plans import DraftMethod, DraftPlan
from specpool.protocol.rounds import Branch, ItemStatus, OwnDraft, Proposal, VerifyItem
from specpool.protocol.worker_info import WorkerInfo

# Rounds of backoff after the draft worker had no free slot.
DRAFT_BACKOFF_ROUNDS = 16


class Drafts(DraftItems):
    """The drafts of one sequence in one round."""

    def __init__(
        self,
        sequence: Sequence,
        plan: DraftPlan,
        round_id: int,
        chance: Callable[[float], float],
        own_draft: WorkerInfo | None,
    ) -> None:
        """`chance`: acceptance probability by draft probability, for sequences without an assigned draft model.

        For the other arguments see `DraftItems`.
        """
        super().__init__(sequence, plan, round_id, own_draft)
        self.proposal: Proposal | None = None
        """The proposal whose tokens the round verifies."""
        self.cache_misses = 0
        model = sequence.draft.model
        self._chance = chance if model is None else model.calibration.chance
        self._planned_length = len(sequence.token_ids)
        self._ahead: Proposal | None = None
        """Branches drafted during the verification."""
        self._by_outcome: dict[tuple[int, int], tuple[Proposal | None, tuple[int, ...]]] = {}
        """Proposal (None for a lookup) and tokens to verify, by outcome of the pending round."""
        self._draft_ids: tuple[int, ...] = ()
        """Proposed tokens to verify."""

    # --- The answer

    def take_proposal(self, proposal: Proposal, target_vocab_size: int) -> None:
        """Take the draft tokens, and the number of positions that the draft worker has cached."""
        if self._is_cached(proposal):
            self.proposal = proposal
            self._draft_ids = self._likely(known_tokens(proposal.draft_token_ids, target_vocab_size), proposal)

    def take_ahead(self, proposal: Proposal, target_vocab_size: int) -> tuple[Branch, ...]:
        """Take the branches drafted during the verification. Return them."""
        if self.sequence.is_preempted or not self._is_cached(proposal):
            return ()
        for branch in proposal.branches:
            branch.draft_token_ids = known_tokens(branch.draft_token_ids, target_vocab_size)
        self._ahead = proposal
        return proposal.branches

    def _is_cached(self, proposal: Proposal) -> bool:
        """Record the number of positions that the draft worker has cached. Return False if it has none."""
        sequence, cache = self.sequence, self.sequence.draft
        if proposal.status is ItemStatus.OK:
            # Draft tokens are not committed yet.
            cache.commit(min(proposal.num_cached_tokens, len(sequence.token_ids)))
            if cache.features is not None:
                cache.features.mark_read(self._read_end)
            return True
        # On first contact, only the prediction can miss.
        self.cache_misses += proposal.status is ItemStatus.CACHE_MISS and cache.base_length > 0
        cache.miss()
        if proposal.status is ItemStatus.NO_SLOT:
            cache.back_off(self._round_id + DRAFT_BACKOFF_ROUNDS)
        return False

    def _likely(self, token_ids: tuple[int, ...], proposal: Proposal) -> tuple[int, ...]:
        """Draft tokens that are worth verifying; all of them without confidences."""
        return likely_tokens(token_ids, map(self._chance, proposal.confidences), self.plan.min_chance)

    def take_own(self, own: OwnDraft) -> None:
        """Take the own draft that the round found in the target worker. Call after the commit."""
        self._is_cached(own)
        self.proposal, self._draft_ids = own, own.verified_ids

    # --- Branches of the round before

    def take_branches(self, target_selects: bool) -> None:
        """Take the branch that matches the last verification, if there is one.

        If the outcome is unknown and the target can select, take all branches. The lookup forms a branch as well.
        """
        sequence = self.sequence
        if sequence.target.continues:
            if target_selects:
                self._take_all_branches(sequence.target.pending[-1])
        elif sequence.branch is not None and sequence.is_decoding:
            self.proposal, self._draft_ids = self._drafts_of(sequence.branch, self._limit)

    def _take_all_branches(self, pending: PendingRound) -> None:
        sequence = self.sequence
        if self.wants_drafts:
            limit = min(self.plan.num_draft_tokens, sequence.request.num_speculative_tokens)
            for branch in pending.branches:
                drafts = self._drafts_of(branch, min(limit, sequence.remaining - branch.num_accepted - 2))
                self._by_outcome.setdefault(branch.outcome, drafts)
        if self.plan.lookup_ids and not pending.item.branches:
            self._take_lookup(pending.item)

    def _take_lookup(self, pending: VerifyItem) -> None:
        """Add the rest of the lookup as a branch for the outcome that the lookup predicts.

        If the pending round verifies the target worker's own draft, add a branch for each number of accepted tokens.
        """
        sequence, looked_up = self.sequence, self.plan.lookup.token_ids
        gained = tuple(sequence.token_ids[self._planned_length :])
        if gained != looked_up[: len(gained)]:
            return
        num_own = pending.own_draft.max_verified if pending.own_draft is not None else 0
        agreed = agreement_length(pending.draft_token_ids, looked_up[len(gained) :])
        for accepted in range(num_own + 1) if num_own else (agreed,):
            if (end := len(gained) + accepted) >= len(looked_up):
                break
            limit = min(len(self.plan.lookup_ids), sequence.remaining - accepted - 2)
            rest, outcome = looked_up[end + 1 : end + 1 + max(0, limit)], (accepted, looked_up[end])
            if outcome not in self._by_outcome or not self._by_outcome[outcome][1]:
                self._by_outcome[outcome] = None, rest

    def _drafts_of(self, branch: Branch, limit: int) -> tuple[Proposal, tuple[int, ...]]:
        """The first `limit` draft tokens of a branch as a proposal, and those worth verifying."""
        drafted = branch.draft_token_ids[: max(0, limit)]
        proposal = Proposal(self.sequence.sequence_id, ItemStatus.OK, drafted, 0, branch.confidences)
        return proposal, self._likely(drafted, proposal)

    # --- The verification

    @property
    def branches(self) -> tuple[Branch, ...]:
        """Draft tokens for each outcome of the pending round, for the target worker to select from."""
        return tuple(Branch(*outcome, ids) for outcome, (_, ids) in self._by_outcome.items() if ids)

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Draft tokens to verify. Empty if the target worker selects a branch."""
        if not self.sequence.is_decoding or any(draft_ids for _, draft_ids in self._by_outcome.values()):
            return ()
        return self._draft_ids or self._lookup_ids

    @property
    def method(self) -> DraftMethod:
        """Method that proposed the tokens to verify, if there are any."""
        return DraftMethod.MODEL if self._draft_ids else self.plan.lookup.source.method

    @property
    def max_num_tokens(self) -> int:
        """Maximum number of draft tokens to verify."""
        num_own = self._num_own_tokens if self.sequence.is_decoding else 0
        return max([num_own, len(self.token_ids), *(len(draft_ids) for _, draft_ids in self._by_outcome.values())])

    @property
    def _lookup_ids(self) -> tuple[int, ...]:
        """The next lookup tokens, if all tokens gained since the plan agree with the lookup."""
        sequence, limit, looked_up = self.sequence, len(self.plan.lookup_ids), self.plan.lookup.token_ids
        if not limit:
            return ()
        gained, pending_gain = tuple(sequence.token_ids[self._planned_length :]), sequence.target.max_pending_gain
        if gained != looked_up[: len(gained)] or pending_gain > 1:
            return ()
        start = len(gained) + pending_gain
        return looked_up[start : start + max(0, min(limit, sequence.max_num_lookup_tokens))]

    def select(self) -> tuple[int, int] | None:
        """Select the branch that matches the round before. Return its outcome; None if there were no branches."""
        if not self._by_outcome:
            return None
        outcome = self.sequence.num_accepted, self.sequence.token_ids[-1]
        self.proposal, draft_ids = self._by_outcome.get(outcome, (None, ()))
        self._draft_ids = draft_ids if self.proposal is not None else ()
        return outcome

    @property
    def num_branches(self) -> int:
        """Number of branches that were to be drafted during the verification, if they arrived."""
        return self._num_branches if self._ahead is not None else 0

    def settle(self, gained: tuple[int, ...]) -> int | None:
        """Keep the draft worker's cache as far as it agrees with the verified tokens, before they are committed.

        Return the index of the branch that matches them.
        """
        sequence, index = self.sequence, None
        length, accepted = len(sequence.token_ids), len(gained) - 1
        if self._ahead is not None:
            sequence.draft.commit(min(self._ahead.num_cached_tokens, length + accepted))
            outcomes = [branch.outcome for branch in self._ahead.branches]
            index = outcomes.index((accepted, gained[-1])) if (accepted, gained[-1]) in outcomes else None
        if self.proposal is not None and self.proposal.num_cached_tokens:  # drafted for this round
            agreed = length + agreement_length(self.proposal.draft_token_ids, gained)
            sequence.draft.commit(min(self.proposal.num_cached_tokens, agreed))
        return index

    def branch(self, index: int | None) -> Branch | None:
        """A branch drafted during the verification."""
        return None if index is None or self._ahead is None else self._ahead.branches[index]
