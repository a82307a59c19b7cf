"""Own drafts of a target worker that carries a draft: which tokens a round verifies, and drafting for the next round.

After each round, the draft catches up with the committed tokens and drafts after them. The sequence's slot keeps the
draft tokens until the next round. A failed draft does not fail a round: without drafts, rounds only take longer.
"""

import logging
import time
from collections.abc import Mapping, Sequence
from functools import lru_cache

import torch

from draft_worker.proposer import Drafted, Proposer
from specpool.drafting.acceptance import agreement_length, known_tokens, likely_tokens
from specpool.engine.cache.carried import KeptDraft
from specpool.engine.cache.slots import SequenceKey, Slot
from specpool.engine.passes.drafts import acceptance_chance
from specpool.engine.run.device_round import SpanResult
from specpool.engine.run.engine import Engine
from specpool.protocol.rounds import (
    ItemStatus,
    OwnDraft,
    OwnDraftItem,
    Proposal,
    ProposeItem,
    ProposeRound,
    VerifyItem,
    VerifyRound,
)
from specpool.worker.backend import describe, failure_of
from target_worker.device_rounds import DeviceRounds

log = logging.getLogger(__name__)

MIN_CATCHUP = 256
"""Maximum number of committed tokens that the draft runs after a round, unless the target's pass ran more."""
MAX_STATES = 256
"""Maximum number of a sequence's hidden states that wait for the draft to read them."""

_NOTHING = KeptDraft(0, 0)

Found = tuple[KeptDraft, int]
"""The draft that a round found in a sequence's slot, and how many of its tokens the round verifies."""


class OwnDrafts:
    """Drafts for the sequences of a target worker, made by a draft in the same process."""

    def __init__(self, target: Engine, proposer: Proposer) -> None:
        self.proposer = proposer
        self.rows: Sequence[int] = ()
        """Tokens run by each pass of the last draft. Empty if the draft only caught up, or did not run."""
        self._target = target
        self._draft_ns = 0
        """Nanoseconds that `draft` has taken so far, without realignment."""
        features = proposer.engine.loaded.features
        self.layers: tuple[int, ...] = () if features is None else features.layers
        """Layers of the target whose states the draft reads."""
        self.device_rounds = DeviceRounds(target, proposer, self.layers)

    @property
    def draft_ns(self) -> int:
        """Nanoseconds spent on drafts so far, without realignment."""
        return self._draft_ns + self.device_rounds.draft_ns

    # --- Before the target's pass

    def select(self, rounds: Sequence[VerifyRound]) -> dict[SequenceKey, Found]:
        """Replace draft tokens of items with own draft tokens. Return the drafts found. Call before realignment."""
        found = {}
        for round_ in rounds:
            for item in round_.items:
                slot, own = self._target.slots.find((round_.coordinator_id, item.sequence_id)), item.own_draft
                if own is None or slot is None:
                    continue
                if (draft := slot.carried.find(item.base_length, item.token_ids)) is not None:
                    token_ids = self._worth_verifying(item, own, draft, round_.chances)
                    item.draft_token_ids = token_ids or item.draft_token_ids
                    found[round_.coordinator_id, item.sequence_id] = draft, len(token_ids)
        return found

    def _worth_verifying(
        self, item: VerifyItem, own: OwnDraftItem, draft: KeptDraft, chances: Sequence[float]
    ) -> tuple[int, ...]:
        if item.prefill_only:
            return ()
        room = min(own.max_length, self._target.max_model_len) - item.end + len(item.draft_token_ids)
        token_ids = draft.token_ids[: max(0, min(own.max_verified, room, self._target.slots.max_draft_tokens))]
        if not own.min_chance:
            return token_ids
        return likely_tokens(
            token_ids, (acceptance_chance(each, chances) for each in draft.confidences), own.min_chance
        )

    def reads(self, item: VerifyItem) -> bool:
        """Whether to keep the states of an item's tokens for the draft."""
        own = item.own_draft
        return bool(self.layers) and own is not None and (own.num_draft_tokens > 0 or item.want_features)

    # --- After the target's pass

    def keep_states(self, key: SequenceKey, base_length: int, states: torch.Tensor) -> None:
        """Keep the states of the positions from `base_length` on, [n, width], until the draft reads them."""
        carried, end = self._target.slots[key].carried, base_length + len(states)
        if carried.states is not None and carried.states_end == base_length:
            states = torch.cat([carried.states, states])
        carried.states, carried.states_end = states, end

    def draft(
        self,
        rounds: Sequence[VerifyRound],
        judged: Mapping[SequenceKey, VerifyItem],
        found: Mapping[SequenceKey, Found],
        num_tokens: int,
        results: Mapping[SequenceKey, SpanResult],
    ) -> dict[SequenceKey, OwnDraft]:
        """Catch up with the committed tokens of sequences, and draft. Return the report on each sequence.

        `judged`: the items with a valid verdict. `num_tokens`: tokens of the target's pass. `results`: of
        `device_rounds`. If not empty, the device has already drafted.
        """
        self.rows = ()
        asked = {key: item.own_draft for key, item in judged.items() if item.own_draft is not None}
        if not asked:
            return {}
        began, realigned = time.perf_counter_ns(), self.proposer.realign_ns
        drafted = {key: result.drafted for key, result in results.items() if result.drafted is not None}
        following = {key: own for key, own in asked.items() if key in drafted or not results}
        items = self._next_items(following, max(MIN_CATCHUP, num_tokens))
        proposals = self._propose(rounds, items, drafted) if items else {}
        for key, proposal in proposals.items():
            if proposal.status is ItemStatus.OK:
                self._take(key, items[key], proposal)
        for key, own in asked.items():
            if key in found and not own.num_draft_tokens:
                self._keep_rest(key, found[key][0])
            if self.layers:
                self._drop_states(key, MAX_STATES)
        self._draft_ns += time.perf_counter_ns() - began - (self.proposer.realign_ns - realigned)
        return {key: self._report(key, found.get(key), proposals.get(key)) for key in asked}

    def _next_items(self, asked: Mapping[SequenceKey, OwnDraftItem], room: int) -> dict[SequenceKey, ProposeItem]:
        """Return the items for the draft, which run at most `room` tokens together. Short items come first."""
        missing = []
        for key, own in asked.items():
            if own.num_draft_tokens:
                base = self._base_length(key)
                first = base or self._cached_prefix(key)
                missing.append((_length(self._target.slots[key]) - first, key, base, first))
        items = {}
        for count, key, base, first in sorted(missing):
            proposed = self._item(key, asked[key], base, first + min(count, room))
            if proposed is not None:
                items[key] = proposed
                room -= base + len(proposed.token_ids) - first
        return items

    def _cached_prefix(self, key: SequenceKey) -> int:
        """Return the number of a new sequence's leading tokens that the draft's prefix cache holds."""
        slot = self._target.slots[key]
        if slot.cache_namespace is None:
            return 0
        committed = _committed(slot, 0, _length(slot))
        return self.proposer.engine.slots.cached_prefix(slot.cache_namespace, committed)

    def _base_length(self, key: SequenceKey) -> int:
        """Return the number of leading positions that the draft need not run again."""
        slot, own = self._target.slots[key], self.proposer.engine.slots.find(key)
        if own is None:
            return 0
        carried, end = slot.carried, own.num_cached_tokens
        start = min(carried.num_agreed, end)
        agreed = start + agreement_length(tuple(own.token_ids[start:end]), _committed(slot, start, end))
        if carried.states is not None:  # the draft ran the tokens after these states without reading them
            agreed = min(agreed, carried.states_end - len(carried.states) + 1)
        return self.proposer.engine.slots.reach(own, min(agreed, _length(slot) - 1))

    def _item(self, key: SequenceKey, own: OwnDraftItem, base: int, end: int) -> ProposeItem | None:
        """Return the item that runs committed tokens up to `end`, and drafts after the last one. None: leave it out."""
        slot, draft = self._target.slots[key], self.proposer.engine
        token_ids, length = _committed(slot, base, end), _length(slot)
        # The target's output head can be larger than the draft's, and yield tokens outside the draft's vocabulary.
        if not token_ids or max(token_ids) >= draft.vocab_size or end > draft.max_model_len:
            return None
        num_draft_tokens = 0
        if slot.next_token is not None and end == length:
            max_length = min(own.max_length, self._target.max_model_len, draft.max_model_len)
            num_draft_tokens = min(own.num_draft_tokens, max_length - length)
            if num_draft_tokens <= 0:
                return None
        return ProposeItem(
            key[1],
            base,
            token_ids,
            sampling=None if base or slot.sampling is None else slot.sampling.params,
            cache_namespace=None if base else slot.cache_namespace,
            num_draft_tokens=num_draft_tokens,
            min_chance=own.min_chance if num_draft_tokens else 0.0,
            next_chance=own.next_chance,
        )

    def _propose(
        self, rounds: Sequence[VerifyRound], items: Mapping[SequenceKey, ProposeItem], drafted: Drafted
    ) -> dict[SequenceKey, Proposal]:
        """Draft for all rounds together. Return no proposals if the draft fails."""
        asked = []
        for each in rounds:
            keys = [(each.coordinator_id, item.sequence_id) for item in each.items]
            own = [items[key] for key in keys if key in items]
            asked.append(ProposeRound(each.coordinator_id, each.round_id, own, each.chances, each.step_cost))
        states = {key: self._states_for(key, item) for key, item in items.items()} if self.layers else {}
        try:
            given = {key: each for key, each in states.items() if each is not None}
            proposals = self.proposer.propose(asked, given, drafted)
        except Exception as error:
            if failure_of(error) is not None:
                raise
            _warn(describe(error))
            return {}
        self.rows = self.proposer.rows
        return {
            (round_.coordinator_id, proposal.sequence_id): proposal
            for round_, own_proposals in zip(asked, proposals, strict=True)
            for proposal in own_proposals
        }

    def _states_for(self, key: SequenceKey, item: ProposeItem) -> torch.Tensor | None:
        """Return the states before an item's last tokens; None if there are none."""
        carried = self._target.slots[key].carried
        states: torch.Tensor | None = carried.states
        count = carried.num_states_from(_read_end(item))
        return states[:-count] if states is not None and count else states

    def _take(self, key: SequenceKey, item: ProposeItem, proposal: Proposal) -> None:
        """Keep a proposal for the next round. `item`: as it was before realignment."""
        slot = self._target.slots[key]
        carried = slot.carried
        carried.num_agreed = min(proposal.num_cached_tokens, _length(slot))  # draft tokens are not committed yet
        self._drop_states(key, carried.num_states_from(_read_end(item)))
        token_ids = known_tokens(proposal.draft_token_ids, self._target.vocab_size)
        if token_ids and slot.next_token is not None:
            confidences = proposal.confidences[: len(token_ids)]
            carried.made = KeptDraft(slot.num_cached_tokens, slot.next_token, token_ids, confidences)

    def _keep_rest(self, key: SequenceKey, found: KeptDraft) -> None:
        """Keep the rest of a draft after a round that drafts nothing. The next round verifies it."""
        slot = self._target.slots[key]
        slot.carried.made = found.rest(_committed(slot, found.base_length + 1, _length(slot)))

    def _drop_states(self, key: SequenceKey, count: int) -> None:
        """Keep at most the last `count` states of a sequence."""
        carried = self._target.slots[key].carried
        if not count:
            carried.states = None
        elif carried.states is not None:
            rest = carried.states[max(0, len(carried.states) - count) :]
            is_view = rest.untyped_storage().nbytes() > rest.nbytes  # a view keeps the whole pass's states alive
            carried.states = rest.clone() if is_view else rest

    def _report(self, key: SequenceKey, found: Found | None, proposal: Proposal | None) -> OwnDraft:
        """Return the draft that a round found, and the state of the draft's cache."""
        own = self.proposer.engine.slots.find(key)
        status = ItemStatus.CACHE_MISS if own is None else ItemStatus.OK
        if proposal is not None:
            status = proposal.status
        num_agreed = self._target.slots[key].carried.num_agreed
        num_cached_tokens = 0 if own is None else min(num_agreed, own.num_cached_tokens)
        draft, num_verified = found or (_NOTHING, 0)
        return OwnDraft(
            key[1], status, draft.token_ids, num_cached_tokens, draft.confidences, num_verified=num_verified
        )


@lru_cache(1)
def _warn(reason: str) -> None:
    """Warn once, not in every round."""
    log.warning("the draft failed (%s); continuing without drafts", reason)


def _read_end(item: ProposeItem) -> int:
    """Return the end of the positions whose states an item reads. The last token's own state is not read."""
    return item.base_length + len(item.token_ids) - 1


def _length(slot: Slot) -> int:
    """Return the number of committed tokens of a sequence."""
    return slot.num_cached_tokens + (slot.next_token is not None)


def _committed(slot: Slot, start: int, end: int) -> tuple[int, ...]:
    """Return the committed tokens at these positions."""
    cached = tuple(slot.token_ids[start : min(end, slot.num_cached_tokens)])
    return cached if slot.next_token is None or end <= slot.num_cached_tokens else (*cached, slot.next_token)
