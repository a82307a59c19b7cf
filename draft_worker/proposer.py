"""Drafting: one forward pass to catch up with the committed tokens, then one for each further draft token."""

import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice

from specpool.engine.cache.spans import Span
from specpool.engine.run.engine import Engine
from specpool.engine.run.sequences import Choices, SequenceEngine
from specpool.protocol.rounds import ItemStatus, Proposal, ProposeItem

log = logging.getLogger(__name__)


@dataclass
class _Draft:
    """An unfinished draft of one sequence."""

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
        """The tokens of the next pass. The first pass takes all tokens that the draft has not cached. After a full
        acceptance they include its own last token."""
        return (self.token_ids[-1],) if self.token_ids else self.item.token_ids


Choose = Callable[[Mapping[int, Span]], Mapping[int, Choices]]
"""Caches the new tokens of each span, by sequence id, and chooses the token after each span with logits."""


class _DeviceDraft:
    """Drafts all tokens of a round on the device at once, and hands them out one step at a time."""

    def __init__(self, engine: Engine, lengths: Mapping[int, int]) -> None:
        """`lengths`: number of draft tokens by sequence id."""
        self._engine, self._lengths = engine, lengths
        self._drafts: dict[int, Iterator[tuple[int, float]]] = {}

    def __call__(self, spans: Mapping[int, Span]) -> dict[int, Choices]:
        """The next token of each sequence. The first call has the spans of all sequences."""
        if not self._drafts:
            drafted = self._engine.draft(list(spans.values()), [self._lengths[i] for i in spans])
            for sequence_id, tokens, probabilities in zip(spans, *drafted, strict=True):
                self._drafts[sequence_id] = zip(tokens, probabilities, strict=True)
        steps = {sequence_id: list(islice(self._drafts[sequence_id], 1)) for sequence_id in spans}
        return {
            sequence_id: Choices([token for token, _ in step], [probability for _, probability in step])
            for sequence_id, step in steps.items()
        }


class Proposer(SequenceEngine):
    """The draft worker's backend."""

    def propose(
        self,
        coordinator_id: str,
        round_id: int,
        items: Sequence[ProposeItem],
        chances: Sequence[float] = (),
        step_cost: float = 0.0,
    ) -> list[Proposal]:
        """One proposal for each item, in item order.

        `chances`: acceptance probability of a token, by the draft's own probability in equal steps from 0 to 1; empty:
        use the draft's own probability. `step_cost`: minimum expected gain of a draft step over all items.
        """
        realigned = self.realign(coordinator_id, round_id, items)
        states = {item.sequence_id: state for item, state in zip(items, realigned, strict=True)}
        drafts = [_Draft(item) for item in items if states[item.sequence_id] is ItemStatus.OK]
        drafting, choose = drafts, self._chooser(coordinator_id, drafts)
        while drafting:
            self._advance(coordinator_id, drafting, chances, choose)
            drafting = [draft for draft in drafting if draft.wants_more]
            if sum(draft.gain for draft in drafting) < step_cost:
                break
        proposals = {draft.item.sequence_id: self._proposal(coordinator_id, draft) for draft in drafts}
        return [proposals.get(i, Proposal(i, state)) for i, state in states.items()]

    def _chooser(self, coordinator_id: str, drafts: Sequence[_Draft]) -> Choose:
        """Chooses the tokens of a round: all at once on the device if it can, else step by step."""
        lengths = {draft.item.sequence_id: draft.item.num_draft_tokens for draft in drafts}
        sampled = any(self.engine.slots[coordinator_id, sequence_id].sampling is not None for sequence_id in lengths)
        if self.engine.drafts_ahead and not sampled and max(lengths.values(), default=0) > 1:
            return _DeviceDraft(self.engine, lengths)
        confidences = any(draft.item.min_chance for draft in drafts)
        return lambda spans: self.choose(coordinator_id, spans, confidences)

    def _advance(self, coordinator_id: str, drafts: Sequence[_Draft], chances: Sequence[float], choose: Choose) -> None:
        """Feeds every draft its tokens, and appends the model's choice to each unfinished draft."""
        spans = {
            draft.item.sequence_id: self.span(
                coordinator_id, draft.item.sequence_id, draft.feed, min(1, draft.item.num_draft_tokens)
            )
            for draft in drafts
        }
        choices = choose(spans)
        for draft in drafts:
            sequence_id, chosen = draft.item.sequence_id, choices[draft.item.sequence_id]
            self.keep(coordinator_id, sequence_id, spans[sequence_id].end)
            if not (chosen.finite and all(map(math.isfinite, chosen.confidences))):
                log.warning("sequence %d: logits are not finite; shortening its draft", sequence_id)
                draft.broken = True
                continue
            draft.token_ids.extend(chosen.token_ids)
            if draft.item.min_chance:
                draft.confidences.extend(chosen.confidences)
                draft.chance *= math.prod(_chance(confidence, chances) for confidence in chosen.confidences)

    def _proposal(self, coordinator_id: str, draft: _Draft) -> Proposal:
        return Proposal(
            sequence_id=draft.item.sequence_id,
            status=ItemStatus.OK,
            draft_token_ids=tuple(draft.token_ids),
            num_cached_tokens=self.engine.slots[coordinator_id, draft.item.sequence_id].num_cached_tokens,
            confidences=tuple(draft.confidences),
        )


def _chance(confidence: float, chances: Sequence[float]) -> float:
    """Acceptance probability of a token with the draft probability `confidence`."""
    return chances[min(len(chances) - 1, int(confidence * len(chances)))] if chances else confidence
