"""A turn: one sequence's part in a round. Builds the items for the workers, and applies their answers. Pure."""

from collections.abc import Callable
from itertools import accumulate
from operator import mul
from typing import NamedTuple

from coordinator.scheduling.commits import Commit
from coordinator.scheduling.features import FeatureStore
from coordinator.scheduling.sequence import PendingRound, Prefix, Sequence
from specpool.drafting.acceptance import agreement_length
from specpool.drafting.plans import DraftMethod, DraftPlan
from specpool.protocol.features import FeatureSpec, WantedFeatures
from specpool.protocol.rounds import (
    MAX_ITEM_BRANCHES,
    MAX_ITEM_UNVERIFIED,
    Branch,
    ItemStatus,
    Proposal,
    ProposeItem,
    Verdict,
    VerifyItem,
)
from specpool.protocol.sampling import SamplingParams

# Rounds of backoff after the draft worker had no free slot.
DRAFT_BACKOFF_ROUNDS = 16


class DraftLimits(NamedTuple):
    """What a draft worker can do."""

    max_model_len: int
    vocab_size: int
    reservations_grow: bool = False
    max_branches: int = MAX_ITEM_BRANCHES
    features: FeatureSpec | None = None
    """The hidden states of the target that it reads."""


class Turn:
    """One sequence's part in a round."""

    def __init__(
        self,
        sequence: Sequence,
        plan: DraftPlan,
        round_id: int,
        chance: Callable[[float], float],
        features: WantedFeatures | None = None,
    ) -> None:
        """`features`: that the draft worker reads."""
        self.sequence = sequence
        self._features = features
        self._read_end = 0
        """Number of tokens whose states this round sends to the draft worker."""
        self.cache_misses = 0
        self._planned_length = len(sequence.token_ids)
        self._plan, self._round_id, self._chance = plan, round_id, chance
        self._proposal: Proposal | None = None
        self._ahead: Proposal | None = None
        """Branches drafted during the verification."""
        self._num_branches = 0
        """Branches requested from the draft worker."""
        self._by_outcome: dict[tuple[int, int], tuple[Proposal | None, tuple[int, ...]]] = {}
        """For each outcome of the pending round: the proposal (None for prompt lookup), and the tokens to verify."""
        self._draft_ids: tuple[int, ...] = ()
        """Proposed tokens to verify."""
        self._item: VerifyItem | None = None
        """The item for the target worker."""
        self._pending: PendingRound | None = None
        """The sequence's round at the target worker."""

    # --- Draft worker

    @property
    def is_trial(self) -> bool:
        """Whether the round is a trial of the sequence's draft method."""
        return self._plan.is_trial

    @property
    def wants_drafts(self) -> bool:
        """Whether the draft worker is to draft for the sequence, or to follow its prompt."""
        return self._plan.num_draft_tokens > 0

    @property
    def drafts_ahead(self) -> bool:
        """Whether the draft worker is to draft branches during the verification."""
        return self._plan.num_branches > 0

    def draft_catchup(self, draft_max_len: int) -> int:
        """Number of committed tokens to send to the draft worker; 0 to leave the sequence out."""
        sequence, length = self.sequence, len(self.sequence.token_ids)
        if self._draft_limit <= 0 or length >= draft_max_len or self._round_id < sequence.draft_backoff_until:
            return 0
        if sequence.had_no_slot:  # leave the draft worker's slots to sequences that the target worker serves
            return 0
        if not sequence.is_decoding and sequence.draft_base_length == length:
            return 0
        return length - self._draft_base

    @property
    def _draft_limit(self) -> int:
        return min(self._plan.num_draft_tokens, self.sequence.max_num_draft_tokens)

    @property
    def _draft_base(self) -> int:
        """Positions for the draft worker to keep."""
        # After branches, all tokens may be cached. The last one must run again for its logits.
        return min(self.sequence.draft_base_length, len(self.sequence.token_ids) - 1)

    def propose_item(self, count: int, worker: DraftLimits) -> ProposeItem | None:
        """The item that sends `count` committed tokens to the draft worker; None to leave the sequence out."""
        if (item := self._draft_item(count, (), worker)) is None:
            return None
        is_caught_up = item.end == len(self.sequence.token_ids)
        if is_caught_up and self.sequence.is_decoding:
            item.num_draft_tokens = min(self._draft_limit, worker.max_model_len - item.end)
            item.min_chance = self._plan.min_chance if item.num_draft_tokens else 0.0
            item.next_chance = self._plan.next_chance
        return item

    def ahead_item(self, count: int, worker: DraftLimits) -> ProposeItem | None:
        """The item that sends `count` committed tokens and drafts branches; None to leave the sequence out."""
        yields = self._is_valid and self._pending is not None and self._pending.num_cached_tokens is None
        length = len(self.sequence.token_ids)
        is_caught_up = self._draft_base + count == length
        drafts = self._item.draft_token_ids if self._item is not None else ()
        num_draft_tokens = min(self._draft_limit, worker.max_model_len - length - len(drafts) - 1)
        num_branches = min(self._plan.num_branches, worker.max_branches)
        may_branch = num_branches and yields and is_caught_up and len(drafts) <= MAX_ITEM_UNVERIFIED
        if not may_branch or num_draft_tokens <= 0:
            return self._draft_item(count, (), worker)
        if (item := self._draft_item(count, drafts, worker)) is not None:
            item.num_branches = self._num_branches = num_branches
            item.num_unverified = len(drafts)
            item.num_draft_tokens, item.min_chance = num_draft_tokens, self._plan.min_chance
        return item

    def _draft_item(self, count: int, unverified: tuple[int, ...], worker: DraftLimits) -> ProposeItem | None:
        """The item that extends the draft worker's cache, without draft tokens; None to leave the sequence out."""
        sequence, base = self.sequence, self._draft_base
        tokens = tuple(sequence.token_ids[base : base + count])
        # The target's output head can be larger than the draft's, and yield tokens outside the draft's vocabulary.
        if not tokens or max(tokens + unverified) >= worker.vocab_size:
            return None
        source, sampling = _first_contact(sequence, sequence.num_draft_cached_tokens, base, sequence.draft_prefix)
        reserved = full = None
        if worker.reservations_grow and sequence.reserved is not None:
            reserved = min(sequence.reserved_length, worker.max_model_len)
        if sampling:
            full = min(sequence.max_length, worker.max_model_len)
        end, features, states = base + len(tokens), b"", sequence.features
        if states is not None and states.spec == worker.features and states.is_due(len(sequence.token_ids)):
            features, self._read_end = states.before(base, end), end
        return ProposeItem(
            sequence_id=sequence.sequence_id,
            base_length=base,
            token_ids=tokens + unverified,
            prefix_sequence_id=source,
            sampling=sampling,
            max_length=reserved or full,
            features=features,
        )

    def take_branches(self, target_selects: bool) -> None:
        """Take the branch that matches the last verification, if there is one.

        If the outcome is unknown and the target can select, take all. Prompt-lookup tokens form a branch, too.
        """
        sequence = self.sequence
        if sequence.continues:
            if target_selects:
                self._take_all_branches(sequence.pending[-1])
        elif sequence.branch is not None and sequence.is_decoding:
            self._proposal, self._draft_ids = self._drafts_of(sequence.branch, self._draft_limit)

    def _take_all_branches(self, pending: PendingRound) -> None:
        sequence = self.sequence
        if self.wants_drafts:
            limit = min(self._plan.num_draft_tokens, sequence.request.num_speculative_tokens)
            for branch in pending.branches:
                drafts = self._drafts_of(branch, min(limit, sequence.remaining - branch.num_accepted - 2))
                self._by_outcome.setdefault(branch.outcome, drafts)
        if self._plan.lookup_ids and not pending.item.branches:
            self._take_lookup(pending.item.draft_token_ids)

    def _take_lookup(self, pending_ids: tuple[int, ...]) -> None:
        """Add the remaining prompt-lookup tokens as a branch for the outcome that the lookup predicts."""
        sequence, looked_up = self.sequence, self._plan.lookup.token_ids
        gained = tuple(sequence.token_ids[self._planned_length :])
        accepted = agreement_length(pending_ids, looked_up[len(gained) :])
        end = len(gained) + accepted
        if gained == looked_up[: len(gained)] and end < len(looked_up):
            limit = min(len(self._plan.lookup_ids), sequence.remaining - accepted - 2)
            rest, outcome = looked_up[end + 1 : end + 1 + max(0, limit)], (accepted, looked_up[end])
            if outcome not in self._by_outcome or not self._by_outcome[outcome][1]:
                self._by_outcome[outcome] = None, rest

    def _drafts_of(self, branch: Branch, limit: int) -> tuple[Proposal, tuple[int, ...]]:
        """The first `limit` draft tokens of a branch as a proposal, and those worth verifying."""
        drafted = branch.draft_token_ids[: max(0, limit)]
        proposal = Proposal(self.sequence.sequence_id, ItemStatus.OK, drafted, 0, branch.confidences)
        return proposal, self._likely(drafted, proposal)

    def take_proposal(self, proposal: Proposal, target_vocab_size: int) -> None:
        """Take the draft tokens, and the number of positions that the draft worker has cached."""
        if self._is_cached(proposal):
            self._proposal = proposal
            self._draft_ids = self._likely(known_tokens(proposal.draft_token_ids, target_vocab_size), proposal)

    def take_ahead(self, proposal: Proposal, target_vocab_size: int) -> None:
        """Take the branches drafted during the verification."""
        if not self.sequence.is_preempted and self._is_cached(proposal):
            for branch in proposal.branches:
                branch.draft_token_ids = known_tokens(branch.draft_token_ids, target_vocab_size)
            self._ahead = proposal
            if self._pending is not None:
                self._pending.branches = proposal.branches

    def _is_cached(self, proposal: Proposal) -> bool:
        """Record the number of positions that the draft worker has cached. Return False if it has none."""
        sequence = self.sequence
        if proposal.status is ItemStatus.OK:
            # Draft tokens are not committed yet.
            sequence.num_draft_cached_tokens = min(proposal.num_cached_tokens, len(sequence.token_ids))
            sequence.draft_prefix = None
            if sequence.features is not None:
                sequence.features.mark_read(self._read_end)
            return True
        if sequence.features is not None:
            sequence.features.mark_lost()
        self.cache_misses += proposal.status is ItemStatus.CACHE_MISS and sequence.draft_prefix is None
        sequence.num_draft_cached_tokens, sequence.draft_prefix = 0, None
        if proposal.status is ItemStatus.NO_SLOT:
            sequence.draft_backoff_until = self._round_id + DRAFT_BACKOFF_ROUNDS
        return False

    def _likely(self, token_ids: tuple[int, ...], proposal: Proposal) -> tuple[int, ...]:
        """Draft tokens before the first below `min_chance`; all of them without confidences."""
        chances = accumulate(map(self._chance, proposal.confidences), mul)
        end = next((i for i, chance in enumerate(chances) if chance < self._plan.min_chance), len(token_ids))
        return token_ids[:end]

    # --- Target worker

    @property
    def catchup(self) -> int:
        """Number of tokens that the target worker lacks, apart from draft tokens."""
        return 1 if self.sequence.continues else len(self.sequence.token_ids) - self.sequence.target_base_length

    @property
    def num_draft_tokens(self) -> int:
        """Maximum number of draft tokens to verify."""
        return max([len(self._verified_drafts), *(len(draft_ids) for _, draft_ids in self._by_outcome.values())])

    @property
    def _verified_drafts(self) -> tuple[int, ...]:
        if not self.sequence.is_decoding or any(draft_ids for _, draft_ids in self._by_outcome.values()):
            return ()
        return self._draft_ids or self._lookup_ids

    @property
    def _lookup_ids(self) -> tuple[int, ...]:
        """The tokens of the prompt lookup that remain since the round was planned."""
        sequence, looked_up = self.sequence, self._plan.lookup_ids
        gained = tuple(sequence.token_ids[self._planned_length :])
        if not looked_up or gained != looked_up[: len(gained)] or sequence.max_pending_gain > 1:
            return ()
        rest = looked_up[len(gained) + sequence.max_pending_gain :]
        return rest[: max(0, sequence.max_num_draft_tokens)]

    def verify_item(self, count: int) -> VerifyItem:
        """The item that sends `count` committed tokens to the target worker, followed by draft tokens if decoding.

        If the sequence continues, `complete_item` fills in the tokens later.
        """
        sequence = self.sequence
        after = sequence.pending[-1].round_id if sequence.continues else None
        base = 0 if after is not None else sequence.target_base_length
        tokens = tuple(sequence.token_ids[base : base + count]) if after is None else ()
        source = sampling = None
        if after is None:
            is_known = sequence.num_cached_tokens or len(sequence.pending)
            source, sampling = _first_contact(sequence, is_known, base, sequence.target_prefix)
        prefill_only = after is None and base + len(tokens) < len(sequence.token_ids)
        self._item = VerifyItem(
            sequence_id=sequence.sequence_id,
            base_length=base,
            token_ids=tokens,
            draft_token_ids=self._verified_drafts,
            prefill_only=prefill_only,
            logprobs=sequence.request.logprobs,
            prefix_sequence_id=source,
            sampling=sampling,
            max_length=sequence.reserved_length if sampling or sequence.reserved is not None else None,
            after_round_id=after,
            branches=tuple(Branch(*outcome, ids) for outcome, (_, ids) in self._by_outcome.items() if ids),
            max_draft_tokens=0 if prefill_only else self._max_draft_tokens,
            want_features=self._wants_features(base + len(tokens) if prefill_only else len(sequence.token_ids)),
        )
        num_cached_tokens = base + len(tokens) if prefill_only else None
        self._pending = PendingRound(self._round_id, self._item, num_cached_tokens)
        sequence.pending.append(self._pending)
        return self._item

    def _wants_features(self, end: int) -> bool:
        """Whether to ask for the states of the last committed positions before `end`."""
        if self._features is None or not self.sequence.request.num_speculative_tokens or not self._plan.reads_states:
            return False
        return end > len(self.sequence.token_ids) - self._features.window

    @property
    def _max_draft_tokens(self) -> int:
        """Maximum number of draft tokens, including forced tokens. 0: no forced tokens."""
        sequence = self.sequence
        if not sequence.request.sampling.grammar or not self._plan.allows_forced_tokens:
            return 0
        return max(0, sequence.max_num_draft_tokens)

    @property
    def _is_valid(self) -> bool:
        """Whether the round begins where the sequence is. Otherwise its result is dropped."""
        return self.sequence.pending[:1] == [self._pending]

    def complete_item(self) -> None:
        """Fill in position, last token and draft tokens of a continued item, once the round before has committed."""
        item, sequence = self._item, self.sequence
        if item is None or item.after_round_id is None or not self._is_valid:
            return
        item.base_length, item.token_ids = sequence.num_cached_tokens, (sequence.token_ids[-1],)
        if self._by_outcome:
            outcome = sequence.num_accepted, sequence.token_ids[-1]
            item.select_branch(*outcome)
            self._proposal, draft_ids = self._by_outcome.get(outcome, (None, ()))
            self._draft_ids = draft_ids if self._proposal is not None else ()

    def discard(self) -> None:
        """Drop the round and those that continue it, without a result."""
        pending = self.sequence.pending
        if self._pending in pending:
            del pending[pending.index(self._pending) :]

    def take_verdict(self, verdict: Verdict) -> Commit | None:
        """The commit; None if the sequence only prefilled, has ended, or was not served."""
        sequence = self.sequence
        if sequence.finish is not None or not self._is_valid:
            return None
        sequence.pending.pop(0)
        sequence.had_no_slot = verdict.status is ItemStatus.NO_SLOT
        if verdict.status is not ItemStatus.OK:
            sequence.pending.clear()
            self._handle_failure(verdict)
            return None
        sequence.grammar_waits = 0
        if sequence.target_prefix is not None:
            sequence.target_prefix = None
            if not sequence.num_generated:  # a preempted sequence copies more than its prompt
                assert self._item is not None
                sequence.cached_tokens = self._item.base_length
        if verdict.features:
            self._add_features(verdict)
        if verdict.token_ids:
            return self._commit(verdict)
        sequence.num_cached_tokens = verdict.num_cached_tokens
        return None

    def _add_features(self, verdict: Verdict) -> None:
        """Keep the states of a verdict for the draft worker."""
        sequence, wanted = self.sequence, self._features
        assert wanted is not None
        if sequence.features is None or sequence.features.spec != wanted.spec:
            sequence.features = FeatureStore(wanted)
        sequence.features.add(verdict.features, verdict.num_cached_tokens)

    def _handle_failure(self, verdict: Verdict) -> None:
        if verdict.status is ItemStatus.GRAMMAR_FAILED:
            self.sequence.grammar_error = verdict.error or "unknown reason"
        elif verdict.status is ItemStatus.GRAMMAR_NOT_READY:  # the cache is intact
            self.sequence.grammar_waits += 1
        else:
            self._reset_target_cache(verdict.status)

    def _reset_target_cache(self, status: ItemStatus) -> None:
        sequence = self.sequence
        if status is ItemStatus.NO_SLOT and sequence.num_cached_tokens:
            sequence.lacks_room = True  # another coordinator holds the room; the cache is intact
            return
        if status is not ItemStatus.NO_SLOT:
            sequence.blame.record_cache_miss(sequence.progress)
        if status is ItemStatus.CACHE_MISS:
            # A worker may evict a prefix when it needs the slot. That does not count as a cache miss of this sequence.
            self.cache_misses += sequence.target_prefix is None
            sequence.target_prefix, sequence.cached_tokens = None, 0
        sequence.num_cached_tokens = 0

    def _commit(self, verdict: Verdict) -> Commit:
        sequence, gained = self.sequence, verdict.token_ids
        assert self._item is not None
        drafted = len(self._item.draft_token_ids)
        method = None if not drafted else DraftMethod.MODEL if self._draft_ids else DraftMethod.NGRAM
        index = self._choose_branch(gained)
        if self._proposal is not None and self._proposal.num_cached_tokens:  # drafted for this round
            self._truncate_draft_cache(self._proposal, gained)
        sequence.num_cached_tokens = verdict.num_cached_tokens
        kept, shown = sequence.commit(gained)
        if sequence.finish is not None:
            sequence.pending.clear()
            sequence.features = None
        # If a stop ends the round within the draft, the last emitted token counts as the bonus token.
        all_accepted, forced = len(kept) - 1, verdict.num_forced_tokens
        accepted = min(all_accepted, drafted)
        sequence.speculation.add(drafted + forced, all_accepted)
        return Commit(
            sequence,
            tuple(kept),
            shown,
            verdict.logprobs[: len(kept)],
            drafted,
            accepted,
            method,
            self._proposal,
            self._plan.lookup,
            index,
            self._num_branches if self._ahead is not None else 0,
            forced,
            all_accepted - accepted,
            len(gained) - len(kept),
        )

    def _choose_branch(self, gained: tuple[int, ...]) -> int | None:
        """Keep the branch that matches the verification for the next round. Return its index."""
        sequence, ahead = self.sequence, self._ahead
        sequence.branch, sequence.num_accepted = None, len(gained) - 1
        if ahead is None:
            return None
        accepted = sequence.num_accepted
        sequence.num_draft_cached_tokens = min(ahead.num_cached_tokens, len(sequence.token_ids) + accepted)
        for index, branch in enumerate(ahead.branches):
            if branch.outcome == (accepted, gained[-1]):
                sequence.branch = branch
                return index
        return None

    def _truncate_draft_cache(self, proposal: Proposal, gained: tuple[int, ...]) -> None:
        """Keep the draft worker's cache as far as its tokens agree with the target's."""
        agreed = len(self.sequence.token_ids) + agreement_length(proposal.draft_token_ids, gained)
        self.sequence.num_draft_cached_tokens = min(proposal.num_cached_tokens, agreed)


def _first_contact(
    sequence: Sequence, num_cached_tokens: int, base_length: int, prefix: Prefix | None
) -> tuple[int | None, SamplingParams | None]:
    """The sequence to copy from and the sampling parameters, for a worker that has cached nothing of this sequence."""
    if num_cached_tokens and base_length:
        return None, None
    source = prefix.source.sequence_id if prefix is not None and base_length else None
    return source, sequence.request.worker_sampling


def known_tokens(token_ids: tuple[int, ...], vocab_size: int) -> tuple[int, ...]:
    """The tokens before the first that is outside the vocabulary."""
    end = next((i for i, token in enumerate(token_ids) if token >= vocab_size), len(token_ids))
    return token_ids[:end]
