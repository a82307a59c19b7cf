"""Drafting: one forward pass to catch up with the committed tokens, then one for each further draft token.

`draft_worker.branches` drafts the items that ask for branches.
"""

import logging
from collections.abc import Mapping, Sequence, Set
from dataclasses import replace
from itertools import chain

import torch

from draft_worker.branches import draft_branches, num_tentative, states_of
from specpool.engine.cache.slots import SequenceKey
from specpool.engine.passes.drafts import Draft, DraftRound, extend_drafts, read_choices
from specpool.engine.run.sequences import SequenceEngine, own_items
from specpool.protocol.rounds import MAX_ITEM_BRANCHES, ItemStatus, Proposal, ProposeItem, ProposeRound
from specpool.protocol.worker_info import WorkerInfo

log = logging.getLogger(__name__)

Drafted = Mapping[SequenceKey, Sequence[Sequence[float]]]
"""Draft tokens and their probabilities, by sequence."""


class Proposer(SequenceEngine):
    rows: Sequence[int] = ()
    """Tokens run by each pass of the last `propose`. Empty if it drafted no tokens."""

    def info(self) -> WorkerInfo:
        return replace(super().info(), max_branches=MAX_ITEM_BRANCHES if self.engine.supports_branches else 1)

    def propose(
        self,
        rounds: Sequence[ProposeRound],
        target_states: Mapping[SequenceKey, torch.Tensor] | None = None,
        drafted: Drafted | None = None,
    ) -> list[list[Proposal]]:
        """Draft for rounds of different coordinators in common forward passes.

        `target_states`: the target's hidden states before the last tokens of sequences without branches,
        [at most one per token, width]; they replace the items' `features`. `drafted`: tokens that a `DeviceRound` has
        already drafted and cached after the items' tokens. If not empty, no pass runs.

        One proposal for each item, in item order. An error in one round fails all.
        """
        given = target_states or {}
        rounds = [replace(round_, items=own_items(round_.items)) for round_ in rounds]
        for item in (item for round_ in rounds for item in round_.items):
            item.num_draft_tokens = min(item.num_draft_tokens, self.engine.slots.max_draft_tokens)
        states = [self.realign(round_.coordinator_id, round_.round_id, round_.items) for round_ in rounds]
        served = [
            {
                (round_.coordinator_id, item.sequence_id): item
                for item, state in zip(round_.items, own, strict=True)
                if state is ItemStatus.OK
            }
            for round_, own in zip(rounds, states, strict=True)
        ]
        plain = [{key: item for key, item in own.items() if not item.num_branches} for own in served]
        forced = {
            key: self.forced(key, item.token_ids, item.num_draft_tokens) for own in plain for key, item in own.items()
        }
        drafts = [
            {key: self._draft_of(key, item, forced[key], given.get(key)) for key, item in own.items()} for own in plain
        ]
        self._draft(rounds, drafts, given.keys(), drafted or {})
        branching = {key: item for own in served for key, item in own.items() if item.num_branches}
        chances = {key: round_.chances for round_, own in zip(rounds, served, strict=True) for key in own}
        branches = draft_branches(self, branching, chances)
        proposals = {
            key: self._proposal(key, item, (*forced[key], *draft.token_ids), draft)
            for own, own_drafts in zip(plain, drafts, strict=True)
            for (key, item), draft in zip(own.items(), own_drafts.values(), strict=True)
        }
        for key, own_branches in branches.items():
            cached = self.engine.slots[key].num_cached_tokens
            proposals[key] = Proposal(key[1], ItemStatus.OK, (), cached, branches=own_branches)
        return [
            [
                proposals.get((round_.coordinator_id, item.sequence_id), Proposal(item.sequence_id, state))
                for item, state in zip(round_.items, own_states, strict=True)
            ]
            for round_, own_states in zip(rounds, states, strict=True)
        ]

    def _draft_of(
        self, key: SequenceKey, item: ProposeItem, forced: tuple[int, ...], given: torch.Tensor | None
    ) -> Draft:
        """Build the draft after an item's forced tokens. Its span covers every token that is not cached yet.

        After full acceptance, this includes the draft's own last token. The last draft token is never cached.
        """
        num_draft_tokens, slot = item.num_draft_tokens - len(forced), self.engine.slots[key]
        token_ids = item.token_ids + (forced if num_draft_tokens else forced[:-1])
        following = len(token_ids) - len(item.token_ids)
        states = states_of(item, self.engine.loaded.features, following, given)
        return Draft(
            self.span(key, token_ids, min(1, num_draft_tokens), states, num_tentative=num_tentative(item) + following),
            slot.sampling,
            slot.token_ids,
            num_draft_tokens,
            needs_confidences=bool(item.min_chance),
            min_chance=item.min_chance,
            next_chance=item.next_chance,
        )

    def _draft(
        self,
        rounds: Sequence[ProposeRound],
        drafts: Sequence[Mapping[SequenceKey, Draft]],
        given: Set[SequenceKey],
        drafted: Drafted,
    ) -> None:
        """Extend the drafts of all rounds, and keep their own states.

        `given`: sequences that need no own states, because the target's come with every round. `drafted`: see
        `propose`.
        """
        self.rows = ()
        if not any(drafts):
            return
        num_tokens = sum(len(draft.span.token_ids) for own in drafts for draft in own.values())
        draft_rounds = [
            DraftRound([*own.values()], round_.chances, round_.step_cost)
            for round_, own in zip(rounds, drafts, strict=True)
        ]
        if drafted:
            found = {draft: drafted[key] for own in drafts for key, draft in own.items()}
            extend_drafts(draft_rounds, read_choices(found))
        else:
            self.draft(draft_rounds)
        states, counts = dict[SequenceKey, tuple[int, Sequence[torch.Tensor]]](), list[int]()
        for key, draft in chain.from_iterable(own.items() for own in drafts):
            counts.append(len(draft.token_ids))
            if draft.is_broken:
                log.warning("sequence %d: logits are not finite; shortening its draft", key[1])
            elif draft.own_states and key not in given:
                states[key] = draft.span.end, draft.own_states
        self.keep_states(states)
        if steps := max(counts):
            self.rows = [num_tokens, *(sum(count > step for count in counts) for step in range(1, steps))]

    def _proposal(self, key: SequenceKey, item: ProposeItem, token_ids: tuple[int, ...], draft: Draft) -> Proposal:
        """Record what the draft cached."""
        num_cached_tokens = item.base_length + len(item.token_ids) + max(0, len(token_ids) - 1)
        self.keep(key, num_cached_tokens)
        return Proposal(
            sequence_id=key[1],
            status=ItemStatus.OK,
            draft_token_ids=token_ids,
            num_cached_tokens=num_cached_tokens,
            confidences=tuple(draft.confidences),
        )
