"""A sequence's verification in a round: the item for the target worker, its verdict, and the commit. Pure."""

from coordinator.scheduling.caches import PendingRound
from coordinator.scheduling.commits import Commit
from coordinator.scheduling.drafts import Drafts
from specpool.drafting.plans import DraftMethod
from specpool.protocol.features import WantedFeatures
from specpool.protocol.rounds import ItemStatus, Verdict, VerifyItem


class Verification:
    """The verification of one sequence in one round."""

    def __init__(self, drafts: Drafts, round_id: int, features: WantedFeatures | None) -> None:
        """`features`: hidden states that the draft worker reads."""
        self.sequence, self.drafts = drafts.sequence, drafts
        self.cache_misses = 0
        self.pending: PendingRound | None = None
        """The round at the target worker, once its item is built."""
        self._round_id, self._features = round_id, features

    # --- The item

    @property
    def catchup(self) -> int:
        """Number of tokens that the target worker must run, apart from draft tokens."""
        target = self.sequence.target
        return 1 if target.continues else len(self.sequence.token_ids) - target.start

    def item(self, count: int) -> VerifyItem:
        """Return the item that runs `count` committed tokens, followed by draft tokens if decoding.

        If the sequence continues, `complete` fills in the tokens later.
        """
        sequence, target = self.sequence, self.sequence.target
        after = target.pending[-1].round_id if target.continues else None
        base, start = (target.base_length, target.start) if after is None else (0, 0)
        end = target.fork if start < target.fork < start + count else start + count
        tokens = tuple(sequence.token_ids[base:end]) if after is None else ()
        is_first_contact = after is None and base == 0
        if is_first_contact and self.drafts.own_draft is not None:
            sequence.draft.commit(0)  # the carried draft's cache starts over, too
        end = base + len(tokens)
        prefill_only = after is None and end < len(sequence.token_ids)
        want_features = self._wants_features(end if prefill_only else len(sequence.token_ids))
        item = VerifyItem(
            sequence_id=sequence.sequence_id,
            base_length=base,
            token_ids=tokens,
            draft_token_ids=self.drafts.token_ids,
            prefill_only=prefill_only,
            logprobs=sequence.request.logprobs,
            sampling=sequence.request.worker_sampling if is_first_contact else None,
            cache_namespace=sequence.cache_namespace if is_first_contact else None,
            expected_prefix_length=start - base,
            after_round_id=after,
            branches=self.drafts.branches,
            max_draft_tokens=0 if prefill_only else self._max_draft_tokens,
            want_features=want_features,
            own_draft=self.drafts.own_item(may_verify=sequence.is_decoding, keeps_states=want_features),
        )
        self.pending = PendingRound(self._round_id, item, end if prefill_only else None)
        target.send(self.pending)
        return item

    def _wants_features(self, end: int) -> bool:
        """Whether to ask for the states of the last committed positions before `end`. A carried draft reads all."""
        own_draft = self.drafts.own_draft
        if not self.sequence.request.num_speculative_tokens or not self.drafts.plan.reads_states:
            return False
        if own_draft is not None:
            return own_draft.features is not None
        if self._features is None:
            return False
        return end > len(self.sequence.token_ids) - self._features.window

    @property
    def _max_draft_tokens(self) -> int:
        """Maximum number of draft tokens, including forced tokens. 0: no forced tokens."""
        sequence = self.sequence
        if not sequence.request.sampling.may_force_tokens or not self.drafts.plan.allows_forced_tokens:
            return 0
        return max(0, sequence.max_num_draft_tokens)

    @property
    def _is_awaited(self) -> bool:
        """Whether the round begins where the sequence is. Otherwise its result is dropped."""
        return self.sequence.target.awaits(self.pending)

    @property
    def unverified_ids(self) -> tuple[int, ...] | None:
        """Draft tokens in verification. None if the round yields no tokens."""
        if self.pending is None or not self._is_awaited or self.pending.num_cached_tokens is not None:
            return None
        return self.pending.item.draft_token_ids

    def complete(self) -> None:
        """Fill in position, last token and draft tokens of a continued item, once the round before has committed."""
        if self.pending is None or self.pending.item.after_round_id is None or not self._is_awaited:
            return
        item, sequence = self.pending.item, self.sequence
        item.base_length, item.token_ids = sequence.target.num_cached_tokens, (sequence.token_ids[-1],)
        if (outcome := self.drafts.select()) is not None:
            item.select_branch(*outcome)

    def discard(self) -> None:
        """Drop the round and those that continue it, without a result."""
        self.sequence.target.discard(self.pending)

    # --- The verdict

    def take_verdict(self, verdict: Verdict) -> Commit | None:
        """The commit; None if the sequence only prefilled, has ended, or was not served."""
        sequence, target = self.sequence, self.sequence.target
        if sequence.finish is not None or self.pending is None or not self._is_awaited:
            return None
        target.answer(had_no_slot=verdict.status is ItemStatus.NO_SLOT)
        if verdict.status is not ItemStatus.OK:
            target.discard_all()
            self._handle_failure(verdict, self.pending.item)
            return None
        sequence.grammar_waits = 0
        if not sequence.num_generated:  # afterwards, a preempted sequence also finds its own answer
            before = sequence.cached_tokens if self.pending.item.base_length else 0
            sequence.cached_tokens = before + verdict.prefix_length
        if verdict.features:
            assert self._features is not None
            sequence.draft.add_features(verdict.features, verdict.num_cached_tokens, self._features)
        target.commit(verdict.num_cached_tokens, verdict.reusable_length)
        self.pending.item.expected_prefix_length = verdict.prefix_length  # charge only the tokens that ran
        if verdict.token_ids:
            return self._commit(verdict, self.pending.item)
        if verdict.own_draft is not None:
            self.drafts.take_own(verdict.own_draft)
        return None

    def _handle_failure(self, verdict: Verdict, item: VerifyItem) -> None:
        sequence = self.sequence
        if verdict.status is ItemStatus.GRAMMAR_FAILED:
            sequence.grammar_error = verdict.error or "unknown reason"
        elif verdict.status is ItemStatus.GRAMMAR_NOT_READY:  # the cache is intact
            sequence.grammar_waits += 1
        elif verdict.status is ItemStatus.CACHE_MISS and item.expected_prefix_length:
            sequence.target.mispredict()
        elif verdict.status is not ItemStatus.NO_SLOT:
            self._forget_cache(is_lost=verdict.status is ItemStatus.CACHE_MISS)
        elif sequence.target.num_cached_tokens:  # another coordinator holds the pages
            sequence.target.refuse_room()

    def _forget_cache(self, *, is_lost: bool) -> None:
        sequence, target = self.sequence, self.sequence.target
        sequence.blame.record_cache_miss(sequence.progress)
        if is_lost:
            self.cache_misses += 1
            sequence.cached_tokens = 0
        target.miss()

    # --- The commit

    def _commit(self, verdict: Verdict, item: VerifyItem) -> Commit:
        sequence, drafts, gained, own = self.sequence, self.drafts, verdict.token_ids, verdict.own_draft
        if own is not None and own.num_verified:
            item.draft_token_ids = own.verified_ids
        drafted, forced = len(item.draft_token_ids), verdict.num_forced_tokens
        index = drafts.settle(gained)
        kept, shown = sequence.commit(gained, drafts.branch(index))
        if own is not None:
            drafts.take_own(own)
        # If a stop ends the round within the draft, the last emitted token counts as the bonus token.
        all_accepted = len(kept) - 1
        accepted = min(all_accepted, drafted)
        sequence.speculation.add(drafted + forced, all_accepted)
        if drafted and drafts.method is DraftMethod.PREDICTION:
            sequence.speculation.add_prediction(drafted, accepted)
        return Commit(
            sequence,
            tuple(kept),
            shown,
            verdict.logprobs[: len(kept)],
            drafted,
            accepted,
            method=drafts.method if drafted else None,
            proposal=drafts.proposal,
            lookup=drafts.plan.lookup,
            branch=index,
            num_branches=drafts.num_branches,
            forced=forced,
            accepted_forced=all_accepted - accepted,
            num_dropped=len(gained) - len(kept),
        )
