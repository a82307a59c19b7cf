"""A turn: one sequence's part in a round. What each worker is asked for it, and what the answers change in it. Pure."""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate
from operator import mul

from coordinator.scheduling.commits import Commit, DraftOrder
from coordinator.scheduling.sequence import DraftedAhead, DraftMethod, Prefix, Sequence
from specpool.protocol.rounds import ItemStatus, Proposal, ProposeItem, Verdict, VerifyItem
from specpool.protocol.sampling import SamplingParams

# The draft may lack its own last token and the bonus token: catch-ups as short as this are never cut into chunks.
FEW_TOKENS = 8
# Rounds for which a draft worker without a free slot is not asked for a sequence again.
DRAFT_REST_ROUNDS = 16


@dataclass
class PrefillBudget:
    """Tokens of long catch-ups that one worker can still be sent in this round, for all sequences together."""

    tokens: int

    def take(self, token_ids: list[int], cached: int) -> tuple[int, ...]:
        """The next committed tokens that the worker lacks, as far as the budget goes."""
        missing = len(token_ids) - cached
        if missing <= FEW_TOKENS:
            return tuple(token_ids[cached:])
        count = min(missing, self.tokens)
        self.tokens -= count
        return tuple(token_ids[cached : cached + count])


class Turn:
    """One sequence's part in a round."""

    def __init__(self, sequence: Sequence, order: DraftOrder, round_id: int, chance: Callable[[float], float]) -> None:
        """`chance`: the chance that a draft token is accepted, given the draft's own probability of it."""
        self.sequence = sequence
        self.cache_misses = 0
        self._order, self._round_id, self._chance = order, round_id, chance
        self._proposal: Proposal | None = None
        self._draft_ids: tuple[int, ...] = ()
        """Tokens of the proposal that are to be verified."""
        self._ahead: Proposal | None = None
        """The proposal that continues the first one, drafted while that one was verified."""
        self._verified_base = 0
        """Cached positions that the target worker was told to keep."""

    # --- Draft worker

    def propose_item(self, budget: PrefillBudget, draft_max_len: int, draft_vocab_size: int) -> ProposeItem | None:
        """The item for the draft worker; None if there is nothing to ask."""
        sequence, length = self.sequence, len(self.sequence.token_ids)
        limit = min(self._order.num_draft_tokens, sequence.max_num_draft_tokens)
        if limit <= 0 or length >= draft_max_len or self._round_id < sequence.draft_rests_until:
            return None
        wanted = min(limit, draft_max_len - length) if sequence.is_decoding else 0
        if wanted <= 0 and sequence.draft_base_length == length:
            return None
        # A draft that went ahead has all tokens cached, but the logits after the last one are needed again.
        base = min(sequence.draft_base_length, length - 1)
        tokens = budget.take(sequence.token_ids, base)
        # The target's output head may have more rows than the draft's, and so tokens that the draft does not know.
        if not tokens or max(tokens) >= draft_vocab_size:
            return None
        k = wanted if base + len(tokens) == length else 0
        prefix, sampling = _first_contact(sequence, sequence.num_draft_cached_tokens, base, sequence.draft_prefix)
        return ProposeItem(
            sequence_id=sequence.sequence_id,
            base_length=base,
            token_ids=tokens,
            num_draft_tokens=k,
            prefix_sequence_id=prefix,
            sampling=sampling,
            max_length=min(sequence.max_length, draft_max_len) if sampling else None,
            min_chance=self._order.min_chance if k else 0.0,
            next_chance=self._order.next_chance,
        )

    def propose_drafted_ahead(self, item: ProposeItem) -> None:
        """Answers the item with the tokens that were drafted ahead during the previous round."""
        ahead = self.sequence.drafted_ahead
        assert ahead is not None
        drafted = ahead.token_ids[: item.num_draft_tokens]
        num_cached_tokens = item.base_length + len(item.token_ids) + len(drafted) - 1
        self._proposal = Proposal(item.sequence_id, ItemStatus.OK, drafted, num_cached_tokens, ahead.confidences)
        self._draft_ids = self._likely(drafted, self._proposal)

    def take_proposal(self, proposal: Proposal, target_vocab_size: int) -> None:
        """Notes the draft tokens, and what the draft worker has cached."""
        sequence = self.sequence
        if proposal.status is ItemStatus.OK:
            self._proposal = proposal
            self._draft_ids = self._likely(known(proposal.draft_token_ids, target_vocab_size), proposal)
            # No draft token is committed yet.
            sequence.num_draft_cached_tokens = min(proposal.num_cached_tokens, len(sequence.token_ids))
            sequence.draft_prefix = None
            return
        self.cache_misses += proposal.status is ItemStatus.CACHE_MISS and sequence.draft_prefix is None
        sequence.num_draft_cached_tokens, sequence.draft_prefix = 0, None
        if proposal.status is ItemStatus.NO_SLOT:
            sequence.draft_rests_until = self._round_id + DRAFT_REST_ROUNDS

    def _likely(self, token_ids: tuple[int, ...], proposal: Proposal) -> tuple[int, ...]:
        """The draft tokens up to the first whose chance is below `min_chance`; all of them without confidences."""
        chances = accumulate(map(self._chance, proposal.confidences), mul)
        unlikely = next((i for i, chance in enumerate(chances) if chance < self._order.min_chance), len(token_ids))
        return token_ids[:unlikely]

    def ahead_item(self, most: int, draft_max_len: int) -> ProposeItem | None:
        """The item that asks the draft worker for at most `most` tokens after its proposal, while that is verified.

        None if part of the proposal is not verified, or if no token would be left after the one that the target adds.
        """
        proposal, order, drafts = self._proposal, self._order, self._draft_ids
        if proposal is None or not drafts or len(drafts) < len(proposal.draft_token_ids):
            return None
        end = len(self.sequence.token_ids) + len(drafts)
        longest = min(self.sequence.max_length - 1, draft_max_len)  # a round always gains one token beyond the accepted
        wanted = min(1 + order.num_draft_tokens, longest - end, most)
        if wanted <= 1:
            return None
        return ProposeItem(
            sequence_id=self.sequence.sequence_id,
            base_length=proposal.num_cached_tokens,
            token_ids=drafts[-1:],
            num_draft_tokens=wanted,
            min_chance=order.min_chance,
            next_chance=order.next_chance,
        )

    def take_ahead(self, proposal: Proposal) -> None:
        """Notes what was drafted ahead."""
        self._ahead = proposal

    # --- Target worker

    def verify_item(self, budget: PrefillBudget) -> VerifyItem | None:
        """The item for the target worker; None if the budget leaves nothing to ask."""
        sequence, base = self.sequence, self.sequence.target_base_length
        tokens = (sequence.token_ids[-1],) if sequence.is_decoding else budget.take(sequence.token_ids, base)
        if not tokens:
            return None
        prefix, sampling = _first_contact(sequence, sequence.num_cached_tokens, base, sequence.target_prefix)
        self._verified_base = base
        return VerifyItem(
            sequence_id=sequence.sequence_id,
            base_length=base,
            token_ids=tokens,
            draft_token_ids=(self._draft_ids or self._order.lookup_ids) if sequence.is_decoding else (),
            prefill_only=base + len(tokens) < len(sequence.token_ids),
            logprobs=sequence.request.logprobs,
            prefix_sequence_id=prefix,
            sampling=sampling,
            max_length=sequence.max_length if sampling else None,
        )

    def take_verdict(self, verdict: Verdict) -> Commit | None:
        """The commit; None if the sequence was prefilled, has ended meanwhile, or the worker could not serve it."""
        sequence = self.sequence
        if sequence.finish is not None:
            return None
        if verdict.status is not ItemStatus.OK:
            self._target_lost(verdict.status)
            return None
        if sequence.target_prefix is not None:
            sequence.target_prefix = None
            if not sequence.num_generated:  # else it was set aside, and what it copies now is not its prompt alone
                sequence.cached_tokens = self._verified_base
        if verdict.token_ids:
            return self._commit(verdict)
        sequence.num_cached_tokens = verdict.num_cached_tokens
        return None

    def _target_lost(self, status: ItemStatus) -> None:
        sequence = self.sequence
        if status is not ItemStatus.NO_SLOT:
            sequence.suspicion.missed(sequence.progress)
        if status is ItemStatus.CACHE_MISS:
            # The worker may have needed the slot of a released sequence: then no cache of this one has to be rebuilt.
            self.cache_misses += sequence.target_prefix is None
            sequence.target_prefix, sequence.cached_tokens = None, 0
        sequence.num_cached_tokens = 0

    def _commit(self, verdict: Verdict) -> Commit:
        sequence = self.sequence
        sequence.drafted_ahead = None  # it followed tokens that are no longer the last ones
        drafted = len(self._draft_ids or self._order.lookup_ids)
        if self._proposal is not None:
            self._truncate_draft_cache(self._proposal, verdict.token_ids)
        sequence.num_cached_tokens = verdict.num_cached_tokens
        kept, shown = sequence.commit(verdict.token_ids)
        accepted = min(len(verdict.token_ids) - 1, len(kept))  # tokens after a stop are not counted
        sequence.speculation.add(drafted, accepted)
        return Commit(
            sequence=sequence,
            token_ids=tuple(kept),
            shown=shown,
            logprobs=verdict.logprobs[: len(kept)],
            drafted=drafted,
            accepted=accepted,
            method=self._draft_method,
            proposal=self._proposal,
        )

    @property
    def _draft_method(self) -> DraftMethod | None:
        if self._draft_ids:
            return DraftMethod.MODEL
        return DraftMethod.NGRAM if self._order.lookup_ids else None

    def _truncate_draft_cache(self, proposal: Proposal, gained: tuple[int, ...]) -> None:
        """Drops rejected draft tokens from what counts of the draft worker's cache: it is right as far as the tokens
        drafted are those that were gained."""
        drafted, num_cached_tokens = proposal.draft_token_ids, proposal.num_cached_tokens
        ahead = self._ahead
        if ahead is not None:
            drafted, num_cached_tokens = drafted + ahead.draft_token_ids, ahead.num_cached_tokens
            rest = drafted[len(gained) :]
            if rest and drafted[: len(gained)] == gained and len(gained) == len(proposal.draft_token_ids) + 1:
                self.sequence.drafted_ahead = DraftedAhead(rest, ahead.confidences[1:])
        agreed = len(self.sequence.token_ids) + agreeing(drafted, gained)
        self.sequence.num_draft_cached_tokens = min(num_cached_tokens, agreed)


def _first_contact(
    sequence: Sequence, own_length: int, base_length: int, prefix: Prefix | None
) -> tuple[int | None, SamplingParams | None]:
    """The sequence whose cached positions a worker is to copy, and the sampling parameters: None once it has positions
    of this sequence's own."""
    if own_length:
        return None, None
    source = prefix.source.sequence_id if prefix is not None and base_length else None
    return source, sequence.request.worker_sampling


def agreeing(drafted: tuple[int, ...], gained: tuple[int, ...]) -> int:
    """The number of draft tokens, verified or not, up to the first that differs from the target's choice."""
    pairs = enumerate(zip(drafted, gained, strict=False))
    return next((i for i, (draft, own) in pairs if draft != own), min(len(drafted), len(gained)))


def known(token_ids: tuple[int, ...], vocab_size: int) -> tuple[int, ...]:
    """The tokens up to the first that is outside the vocabulary."""
    unknown = next((i for i, token in enumerate(token_ids) if token >= vocab_size), len(token_ids))
    return token_ids[:unknown]
