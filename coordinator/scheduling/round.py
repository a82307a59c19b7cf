"""One round of one group: propose -> verify -> commit. Pure: says what to ask the workers, takes in what they answer.

The protocol is the same in every state: a worker is told how many cached positions to keep and which committed tokens
follow. A newcomer's prompt, a draft that missed rounds, and a worker that lost its cache differ only in how many tokens
that is. Long ones are cut in chunks, so that those who decode beside them never wait long.
"""

from collections.abc import Callable, Mapping
from collections.abc import Sequence as Items
from dataclasses import dataclass, replace
from itertools import accumulate
from operator import mul
from types import MappingProxyType

from coordinator.scheduling.sequence import (
    DraftedAhead,
    DraftMethod,
    Prefix,
    Sequence,
)
from coordinator.text import ShownText
from protocol.rounds import ItemStatus, Proposal, ProposeItem, Verdict, VerifyItem
from protocol.sampling import SamplingParams, TokenLogprobs

# A draft may lack its own last token and the bonus token; up to so many are never worth a chunk of their own.
FEW_TOKENS = 8
# Rounds for which a draft worker without a free slot is not asked for a sequence again.
DRAFT_REST_ROUNDS = 16


@dataclass(frozen=True)
class Commit:
    """What a round gained for one sequence, with the text that can be shown now."""

    sequence: Sequence
    token_ids: tuple[int, ...]
    shown: ShownText
    logprobs: tuple[TokenLogprobs, ...]
    drafted: int
    accepted: int
    method: DraftMethod
    """By whom the draft tokens were."""
    proposal: Proposal | None
    """What the draft worker answered, of which not everything was verified."""


@dataclass(frozen=True)
class DraftOrder:
    """What a sequence is to have drafted."""

    by_model: int
    """Tokens that the draft worker is asked for."""
    worth: float = 0.0
    """What a token must gain to be drafted and verified: the chance that it and all before it are right."""
    next_chance: float = 1.0
    """The chance of a token that is not drafted yet, if all before it are right."""
    found: tuple[int, ...] = ()
    """Tokens of prompt lookup, verified where there are none by the model."""


class Round:
    """`prefill_tokens`: tokens of long catch-ups that each worker gets in one round, all sequences together."""

    def __init__(
        self,
        round_id: int,
        group: Items[Sequence],
        prefill_tokens: int,
        orders: Mapping[int, DraftOrder] = MappingProxyType({}),
        chance: Callable[[float], float] = float,
    ) -> None:
        """`orders`: by sequence id; without one, as many draft tokens by the model as the request allows.
        `chance`: that a draft token is right, by the draft's own probability of it."""
        self.round_id = round_id
        self.group = group
        self._orders = {i.sequence_id: orders.get(i.sequence_id, DraftOrder(i.draft_limit)) for i in group}
        self.cache_misses = 0
        self._prefill_tokens, self._chance = prefill_tokens, chance
        self._sequences = {sequence.sequence_id: sequence for sequence in group}
        self._proposals: dict[int, Proposal] = {}
        self._drafts: dict[int, tuple[int, ...]] = {}
        self._ahead: dict[int, Proposal] = {}
        self._copied: dict[int, int] = {}

    def propose_items(self, draft_max_len: int, draft_vocab_size: int) -> list[ProposeItem]:
        """What to ask the draft worker, whose sequences can have `draft_max_len` positions. May be nothing."""
        items = []
        room = self._prefill_tokens
        for sequence in self._unfinished():
            length, base, order = len(sequence.token_ids), sequence.draft_base, self._orders[sequence.sequence_id]
            limit = min(order.by_model, sequence.draft_limit)
            wanted = min(limit, draft_max_len - length) if sequence.is_decoding else 0
            useful = limit > 0 and length < draft_max_len and self.round_id >= sequence.draft_rests_until
            if not useful or (wanted <= 0 and base == length):
                continue
            base = min(base, length - 1)  # one that drafted ahead has all, and what it made of the last token is needed
            taken, room = _take(sequence.token_ids, base, room)
            # A target may have rows of its output head, and so tokens, that the draft has not.
            if taken and max(taken) < draft_vocab_size:
                k = wanted if base + len(taken) == length else 0
                prefix, sampling = _first_contact(sequence, sequence.draft_length, base, sequence.draft_prefix)
                reach = min(sequence.max_length, draft_max_len) if sampling else None
                items.append(
                    ProposeItem(
                        sequence_id=sequence.sequence_id,
                        base_length=base,
                        token_ids=taken,
                        num_draft_tokens=k,
                        prefix_sequence_id=prefix,
                        sampling=sampling,
                        max_length=reach,
                        min_chance=order.worth if k else 0.0,
                        next_chance=order.next_chance,
                    )
                )
        return [] if self._take_ahead(items) else items

    def _take_ahead(self, items: Items[ProposeItem]) -> bool:
        """Whether all that these ask for was drafted ahead; then it is taken. If one must be asked for, the others are
        too, which takes no longer and gives them longer drafts."""
        ahead = [self._sequences[item.sequence_id].drafted_ahead for item in items if item.num_draft_tokens]
        if len(ahead) < len(items) or not all(ahead):
            return False
        for item, its in zip(items, ahead, strict=True):
            assert its is not None
            drafted = its.token_ids[: item.num_draft_tokens]
            cached_length = item.base_length + len(item.token_ids) + len(drafted) - 1
            proposal = Proposal(item.sequence_id, ItemStatus.OK, drafted, cached_length, its.confidences)
            self._proposals[item.sequence_id] = proposal
            self._drafts[item.sequence_id] = self._likely(drafted, proposal)
        return True

    def ahead_items(self, most: int, draft_max_len: int) -> list[ProposeItem]:
        """What to ask the draft worker while its tokens are verified, as if all were accepted: at most so many further
        ones, of which the first is a guess at what the target will add. May be nothing."""
        items = []
        for sequence in self._unfinished():
            proposal, drafts = self._proposals.get(sequence.sequence_id), self._drafts.get(sequence.sequence_id, ())
            if proposal is None or not drafts or len(drafts) < len(proposal.draft_token_ids):
                continue
            order, end = self._orders[sequence.sequence_id], len(sequence.token_ids) + len(drafts)
            longest = min(sequence.max_length - 1, draft_max_len)  # one token more than was accepted is always gained
            wanted = min(1 + order.by_model, longest - end, most)
            if wanted > 1:
                items.append(
                    ProposeItem(
                        sequence_id=sequence.sequence_id,
                        base_length=proposal.cached_length,
                        token_ids=drafts[-1:],
                        num_draft_tokens=wanted,
                        min_chance=order.worth,
                        next_chance=order.next_chance,
                    )
                )
        return items

    def take_ahead(self, proposals: Items[Proposal], target_vocab_size: int) -> None:
        """Notes what was drafted while others were verified."""
        for proposal in proposals:
            if proposal.status is ItemStatus.OK:
                known = _known(proposal.draft_token_ids, target_vocab_size)
                self._ahead[proposal.sequence_id] = replace(proposal, draft_token_ids=known)

    def take_proposals(self, proposals: Items[Proposal], target_vocab_size: int) -> None:
        """Notes drafts and what the draft worker has cached. The target is never sent tokens that it does not know."""
        for proposal in proposals:
            sequence = self._sequences[proposal.sequence_id]
            if proposal.status is ItemStatus.OK:
                self._proposals[proposal.sequence_id] = proposal
                self._drafts[proposal.sequence_id] = self._likely(
                    _known(proposal.draft_token_ids, target_vocab_size), proposal
                )
                # Nothing that was drafted is committed yet.
                sequence.draft_length = min(proposal.cached_length, len(sequence.token_ids))
                sequence.draft_prefix = None
            else:
                self._draft_lost(sequence, proposal.status)

    def _likely(self, token_ids: tuple[int, ...], proposal: Proposal) -> tuple[int, ...]:
        """As many of the draft tokens as are likely enough, by the draft's own probabilities if it says them."""
        chances = accumulate(map(self._chance, proposal.confidences), mul)
        least = self._orders[proposal.sequence_id].worth
        unlikely = next((i for i, chance in enumerate(chances) if chance < least), len(token_ids))
        return token_ids[:unlikely]

    def verify_items(self) -> list[VerifyItem]:
        """What to ask the target worker; sequences that were aborted meanwhile are left out."""
        items = []
        room = self._prefill_tokens
        # Newcomers last: one that finds no slot must not take the room of one that has a slot and could finish.
        for sequence in sorted(self._unfinished(), key=lambda sequence: sequence.target_length == 0):
            base = sequence.target_base
            tokens: tuple[int, ...]
            drafts: tuple[int, ...]
            if sequence.is_decoding:
                tokens, drafts = (sequence.token_ids[-1],), self._draft_tokens(sequence.sequence_id)
            else:
                (tokens, room), drafts = _take(sequence.token_ids, base, room), ()
            if tokens:
                partial = base + len(tokens) < len(sequence.token_ids)
                prefix, sampling = _first_contact(sequence, sequence.target_length, base, sequence.target_prefix)
                self._copied[sequence.sequence_id] = base
                items.append(
                    VerifyItem(
                        sequence_id=sequence.sequence_id,
                        base_length=base,
                        token_ids=tokens,
                        draft_token_ids=drafts,
                        prefill_only=partial,
                        logprobs=sequence.request.logprobs,
                        prefix_sequence_id=prefix,
                        sampling=sampling,
                        max_length=sequence.max_length if sampling else None,
                    )
                )
        return items

    def commit(self, verdicts: Items[Verdict]) -> list[Commit]:
        """Takes in the verdicts; returns what each sequence gained, nothing for those that only prefilled."""
        commits = []
        for verdict in verdicts:
            sequence = self._sequences[verdict.sequence_id]
            if sequence.finish is not None:
                continue
            if verdict.status is not ItemStatus.OK:
                self._target_lost(sequence, verdict.status)
                continue
            if sequence.target_prefix is not None:
                sequence.target_prefix = None
                sequence.cached_tokens = self._copied[sequence.sequence_id]
            if verdict.token_ids:
                commits.append(self._commit_one(sequence, verdict))
            else:
                sequence.target_length = verdict.cached_length
        return commits

    def _draft_tokens(self, sequence_id: int) -> tuple[int, ...]:
        """Those to be verified: the model's if there are any."""
        return self._drafts.get(sequence_id, ()) or self._orders[sequence_id].found

    def _commit_one(self, sequence: Sequence, verdict: Verdict) -> Commit:
        by_model, order = self._drafts.get(sequence.sequence_id, ()), self._orders[sequence.sequence_id]
        sequence.drafted_ahead = None  # it followed other tokens
        drafted = len(by_model or order.found)
        accepted = len(verdict.token_ids) - 1
        proposal = self._proposals.get(sequence.sequence_id)
        if proposal is not None:
            self._note_draft(sequence, proposal, verdict.token_ids)
        sequence.target_length = verdict.cached_length
        kept, shown = sequence.commit(verdict.token_ids)
        accepted = min(accepted, len(kept))  # what lies behind a stop is not counted
        sequence.speculation.add(drafted, accepted)
        return Commit(
            sequence=sequence,
            token_ids=tuple(kept),
            shown=shown,
            logprobs=verdict.logprobs[: len(kept)],
            drafted=drafted,
            accepted=accepted,
            method=DraftMethod.MODEL if by_model else DraftMethod.NGRAM,
            proposal=proposal,
        )

    def _note_draft(self, sequence: Sequence, proposal: Proposal, gained: tuple[int, ...]) -> None:
        """The draft's cache is right as far as its tokens are those that were gained."""
        drafted, cached_length = proposal.draft_token_ids, proposal.cached_length
        ahead = self._ahead.get(sequence.sequence_id)
        if ahead is not None:
            drafted, cached_length = drafted + ahead.draft_token_ids, ahead.cached_length
            rest = drafted[len(gained) :]
            if rest and drafted[: len(gained)] == gained and len(gained) == len(proposal.draft_token_ids) + 1:
                sequence.drafted_ahead = DraftedAhead(rest, ahead.confidences[1:])
        sequence.draft_length = min(cached_length, len(sequence.token_ids) + agreeing(drafted, gained))

    def _target_lost(self, sequence: Sequence, status: ItemStatus) -> None:
        if status is ItemStatus.CACHE_MISS:
            # The worker may have needed the slot of a released sequence; that is no cache to be rebuilt.
            self.cache_misses += sequence.target_prefix is None
            sequence.target_prefix, sequence.cached_tokens = None, 0
        sequence.target_length = 0

    def _draft_lost(self, sequence: Sequence, status: ItemStatus) -> None:
        self.cache_misses += status is ItemStatus.CACHE_MISS and sequence.draft_prefix is None
        sequence.draft_length, sequence.draft_prefix = 0, None
        if status is ItemStatus.NO_SLOT:
            sequence.draft_rests_until = self.round_id + DRAFT_REST_ROUNDS

    def _unfinished(self) -> list[Sequence]:
        return [sequence for sequence in self.group if sequence.finish is None]


def _first_contact(
    sequence: Sequence, own_length: int, base_length: int, prefix: Prefix | None
) -> tuple[int | None, SamplingParams | None]:
    """Whose cached positions a worker shall copy, and how it shall choose tokens: nothing once it has some itself."""
    if own_length:
        return None, None
    source = prefix.source.sequence_id if prefix is not None and base_length else None
    return source, sequence.request.worker_sampling


def _take(token_ids: list[int], cached: int, room: int) -> tuple[tuple[int, ...], int]:
    """The next committed tokens that a worker lacks, as many as there is room for, and the room left."""
    missing = len(token_ids) - cached
    if missing <= FEW_TOKENS:
        return tuple(token_ids[cached:]), room
    count = min(missing, room)
    return tuple(token_ids[cached : cached + count]), room - count


def agreeing(drafted: tuple[int, ...], gained: tuple[int, ...]) -> int:
    """How many draft tokens are what the target chose: also of those that were not verified."""
    pairs = enumerate(zip(drafted, gained, strict=False))
    return next((i for i, (draft, own) in pairs if draft != own), min(len(drafted), len(gained)))


def _known(token_ids: tuple[int, ...], vocab_size: int) -> tuple[int, ...]:
    unknown = next((i for i, token in enumerate(token_ids) if token >= vocab_size), len(token_ids))
    return token_ids[:unknown]
