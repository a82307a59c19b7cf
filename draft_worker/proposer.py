"""Drafting: one forward pass to catch up with the committed tokens, then one for each further draft token.

`draft_worker.branches` drafts the items that ask for branches.
"""

import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice

from draft_worker.branches import draft_branches
from draft_worker.outcomes import acceptance_chance
from specpool.engine.cache.slots import SequenceKey
from specpool.engine.cache.spans import Span
from specpool.engine.run.engine import Engine
from specpool.engine.run.sequences import Choices, SequenceEngine
from specpool.protocol.rounds import MAX_ITEM_BRANCHES, ItemStatus, Proposal, ProposeItem, ProposeRound
from specpool.protocol.worker_info import WorkerInfo

log = logging.getLogger(__name__)


@dataclass
class _Draft:
    """An unfinished draft of one sequence."""

    key: SequenceKey
    item: ProposeItem
    token_ids: list[int] = field(default_factory=list)
    confidences: list[float] = field(default_factory=list)
    chance: float = 1.0
    """Estimated probability that all tokens of the draft are accepted."""
    broken: bool = False
    """Whether logits were not finite, which ends the draft."""

    @property
    def wants_more(self) -> bool:
        return not self.broken and len(self.token_ids) < self.item.num_draft_tokens and self.gain >= 0

    @property
    def gain(self) -> float:
        """The next token's acceptance probability minus `min_chance`; infinite without a `min_chance`."""
        if not self.item.min_chance:
            return math.inf
        return self.chance * self.item.next_chance - self.item.min_chance

    @property
    def feed(self) -> tuple[int, ...]:
        """The tokens of the next pass. The first pass takes every token that is not cached yet. After full acceptance,
        this includes the draft's own last token."""
        return (self.token_ids[-1],) if self.token_ids else self.item.token_ids


Choose = Callable[[Mapping[SequenceKey, Span]], Mapping[SequenceKey, Choices]]
"""Caches the new tokens of each span, and chooses the token after each span with logits."""


class _DeviceDraft:
    """Drafts all tokens of a pass on the device at once, and hands them out one step at a time."""

    def __init__(self, engine: Engine, lengths: Mapping[SequenceKey, int]) -> None:
        """`lengths`: number of draft tokens of each sequence."""
        self._engine, self._lengths = engine, lengths
        self._drafts: dict[SequenceKey, Iterator[tuple[int, float]]] = {}

    def __call__(self, spans: Mapping[SequenceKey, Span]) -> dict[SequenceKey, Choices]:
        """The next token of each sequence. The first call has the spans of all sequences."""
        if not self._drafts:
            drafted = self._engine.draft(list(spans.values()), [self._lengths[key] for key in spans])
            for key, tokens, probabilities in zip(spans, *drafted, strict=True):
                self._drafts[key] = zip(tokens, probabilities, strict=True)
        steps = {key: list(islice(self._drafts[key], 1)) for key in spans}
        return {
            key: Choices([token for token, _ in step], [probability for _, probability in step])
            for key, step in steps.items()
        }


class Proposer(SequenceEngine):
    """The draft worker's backend."""

    def info(self) -> WorkerInfo:
        """Description of the model and its load."""
        return replace(super().info(), max_branches=MAX_ITEM_BRANCHES if self.engine.supports_branches else 1)

    def propose(self, rounds: Sequence[ProposeRound]) -> list[list[Proposal]]:
        """Draft for rounds of different coordinators in common forward passes.

        One proposal for each item, in item order. An error in one round fails all.
        """
        states = [self.realign(round_.coordinator_id, round_.round_id, round_.items) for round_ in rounds]
        served = [
            {
                (round_.coordinator_id, item.sequence_id): item
                for item, state in zip(round_.items, own, strict=True)
                if state is ItemStatus.OK
            }
            for round_, own in zip(rounds, states, strict=True)
        ]
        drafts = [[_Draft(key, item) for key, item in own.items() if not item.num_branches] for own in served]
        self._draft(rounds, drafts)
        branching = {key: item for own in served for key, item in own.items() if item.num_branches}
        chances = {key: round_.chances for round_, own in zip(rounds, served, strict=True) for key in own}
        branches = draft_branches(self, branching, chances)
        proposals = {draft.key: self._proposal(draft) for own in drafts for draft in own}
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

    def _draft(self, rounds: Sequence[ProposeRound], drafts: Sequence[list[_Draft]]) -> None:
        """Extend the drafts of all rounds step by step until each round has enough."""
        choose = self._chooser([draft for own in drafts for draft in own])
        drafting = list(drafts)
        while any(drafting):
            chances = [round_.chances for round_, own in zip(rounds, drafting, strict=True) for _ in own]
            self._advance([draft for own in drafting for draft in own], chances, choose)
            drafting = [_unfinished(own, round_.step_cost) for round_, own in zip(rounds, drafting, strict=True)]

    def _chooser(self, drafts: Sequence[_Draft]) -> Choose:
        """Choose the draft tokens: all at once if the device can, otherwise step by step."""
        lengths = {draft.key: draft.item.num_draft_tokens for draft in drafts}
        sampled = any(self.engine.slots[key].sampling is not None for key in lengths)
        if self.engine.drafts_ahead and not sampled and max(lengths.values(), default=0) > 1:
            return _DeviceDraft(self.engine, lengths)
        confidences = any(draft.item.min_chance for draft in drafts)
        return lambda spans: self.choose(spans, confidences)

    def _advance(self, drafts: Sequence[_Draft], chances: Sequence[Sequence[float]], choose: Choose) -> None:
        """Feed every draft its tokens, and append the model's choice to each unfinished draft."""
        spans = {draft.key: self.span(draft.key, draft.feed, min(1, draft.item.num_draft_tokens)) for draft in drafts}
        choices = choose(spans)
        for draft, bins in zip(drafts, chances, strict=True):
            chosen = choices[draft.key]
            self.keep(draft.key, spans[draft.key].end)
            if not (chosen.finite and all(map(math.isfinite, chosen.confidences))):
                log.warning("sequence %d: logits are not finite; shortening its draft", draft.item.sequence_id)
                draft.broken = True
                continue
            draft.token_ids.extend(chosen.token_ids)
            if draft.item.min_chance:
                draft.confidences.extend(chosen.confidences)
                draft.chance *= math.prod(acceptance_chance(confidence, bins) for confidence in chosen.confidences)

    def _proposal(self, draft: _Draft) -> Proposal:
        return Proposal(
            sequence_id=draft.item.sequence_id,
            status=ItemStatus.OK,
            draft_token_ids=tuple(draft.token_ids),
            num_cached_tokens=self.engine.slots[draft.key].num_cached_tokens,
            confidences=tuple(draft.confidences),
        )


def _unfinished(drafts: Sequence[_Draft], step_cost: float) -> list[_Draft]:
    """The drafts of a round that another step extends; none if it would gain less than `step_cost`."""
    unfinished = [draft for draft in drafts if draft.wants_more]
    return [] if sum(draft.gain for draft in unfinished) < step_cost else unfinished
