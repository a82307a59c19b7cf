"""Draft continuations of sequences and branches token by token, and the rule that ends them.

`native/draft_loop.c` applies the same rule, with the same operations in the same order.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import NamedTuple

import torch

from specpool.engine.cache.checkpoints import Segment
from specpool.engine.cache.slots import SequenceKey, Slot
from specpool.engine.cache.spans import Span
from specpool.engine.sampling.rows import SequenceRows
from specpool.engine.sampling.rules import SequenceRules


class Choice(NamedTuple):
    """The token chosen for a draft."""

    token_id: int
    confidence: float | None = None
    """The model's probability of the token, if requested and decoding is greedy."""
    is_finite: bool = True
    """False if the largest logit is not finite."""


@dataclass(eq=False, slots=True)
class Draft:
    """A draft that continues a sequence or a branch."""

    span: Span
    """The tokens of the next pass. It requests logits after the last one if `num_draft_tokens` is above 0."""
    rules: SequenceRules | None
    """None: greedy."""
    context: list[int]
    """All tokens up to the end of `span`. `feed` appends draft tokens."""
    num_draft_tokens: int
    """Maximum number of draft tokens."""
    prefix_length: int | None = None
    """Of a branch: number of leading tokens that it shares with its sequence."""
    needs_confidences: bool = False
    """Whether to return the model's probability of each draft token. Sampled drafts have no confidences."""
    min_chance: float = 0.0
    """Minimum acceptance probability of a draft token. Drafting stops before a token below it. 0: no minimum."""
    next_chance: float = 1.0
    """Estimated acceptance probability of the next token, given that all earlier draft tokens are accepted."""
    token_ids: list[int] = field(default_factory=list)
    """The draft tokens."""
    confidences: list[float] = field(default_factory=list)
    chance: float = 1.0
    """Estimated probability that all draft tokens are accepted."""
    own_states: list[torch.Tensor] = field(default_factory=list)
    """A feature draft's states [n, hidden] after its passes; each state is an input of the next pass. They may be views
    of the states of all drafts."""
    is_broken: bool = False
    """Whether logits were not finite, which ends the draft."""
    segment: Segment | None = None
    """How a draft loop runs the recurrence of the rows after `span`; None without recurrent layers."""

    @property
    def rows(self) -> SequenceRows:
        """The row of logits after the span, if the span requests logits."""
        return SequenceRows(self.rules, self.context, self.span.num_logits, prefix_length=self.prefix_length)

    @property
    def gain(self) -> float:
        """The next token's acceptance probability minus `min_chance`; infinite without a `min_chance`."""
        return self.chance * self.next_chance - self.min_chance if self.min_chance else math.inf

    @property
    def wants_more(self) -> bool:
        """Whether the next token is likely enough."""
        return not self.is_broken and len(self.token_ids) < self.num_draft_tokens and self.gain >= 0

    def add(self, choice: Choice, chances: Sequence[float]) -> None:
        """Append the chosen token, or end the draft if logits are not finite. `chances`: of the round."""
        token_id, confidence, is_finite = choice
        if not (is_finite and (confidence is None or math.isfinite(confidence))):
            self.is_broken = True
            return
        self.token_ids.append(token_id)
        if confidence is not None and self.needs_confidences:
            self.confidences.append(confidence)
            self.chance *= acceptance_chance(confidence, chances)

    def feed(self, token_ids: Sequence[int]) -> None:
        """Make draft tokens the span of the next pass."""
        span, own_states = self.span, {0: self.own_states[-1][-1]} if self.own_states else None
        self.context += token_ids
        self.span = Span(
            span.slot,
            span.end,
            token_ids,
            1,
            span.prefix_length,
            span.offset,
            own_states=own_states,
            num_tentative=len(token_ids),
        )


@dataclass(frozen=True)
class DraftRound:
    """The drafts of a coordinator's round."""

    drafts: Sequence[Draft]
    chances: Sequence[float] = ()
    """Acceptance probabilities by confidence. See `acceptance_chance`."""
    step_cost: float = 0.0
    """Minimum expected gain of a step over all drafts."""

    def unfinished(self, drafts: Sequence[Draft]) -> Sequence[Draft]:
        """The drafts of the round to extend by another step; none if the step would gain less than `step_cost`."""
        unfinished, gain = [draft for draft in drafts if draft.wants_more], 0.0
        for draft in unfinished:  # not sum(), which rounds differently since Python 3.12
            gain += draft.gain
        return [] if gain < self.step_cost else unfinished


def drafts_of(rounds: Sequence[DraftRound]) -> list[Draft]:
    """All drafts of all rounds, in order."""
    return [draft for round_ in rounds for draft in round_.drafts]


def acceptance_chance(confidence: float, chances: Sequence[float]) -> float:
    """Acceptance probability of a token with the draft probability `confidence`.

    `chances`: acceptance probabilities by confidence, in equal bins from 0 to 1. If empty, the confidence itself.
    """
    return chances[min(len(chances) - 1, int(confidence * len(chances)))] if chances else confidence


Choose = Callable[[Sequence[Draft]], Sequence[Choice | None]]
"""Run the spans of drafts, and choose the token after each. None: the span requests no logits."""


def extend_drafts(rounds: Sequence[DraftRound], choose: Choose) -> None:
    """Extend the drafts of all rounds step by step until each round has enough."""
    drafting = [round_.drafts for round_ in rounds]
    while any(drafting):
        choices = iter(choose([*chain.from_iterable(drafting)]))
        for round_, own in zip(rounds, drafting, strict=True):
            for draft in own:
                if (choice := next(choices)) is not None:
                    draft.add(choice, round_.chances)
        drafting = [round_.unfinished(own) for round_, own in zip(rounds, drafting, strict=True)]
        for draft in chain.from_iterable(drafting):
            draft.feed(draft.token_ids[-1:])


def read_choices(found: Mapping[Draft, Sequence[Sequence[float]]]) -> Choose:
    """Return a function that reads choices already made on the device. `found`: tokens and probabilities by draft."""

    def read(drafts: Sequence[Draft]) -> list[Choice | None]:
        return [_read_choice(draft, *found[draft]) for draft in drafts]

    return read


def _read_choice(draft: Draft, token_ids: Sequence[float], probabilities: Sequence[float]) -> Choice:
    """The next of the tokens chosen for a draft."""
    token_id, probability = int(token_ids[len(draft.token_ids)]), probabilities[len(draft.token_ids)]
    if draft.rules is None:
        return Choice(token_id, probability)
    return Choice(token_id, is_finite=math.isfinite(probability))


@dataclass(frozen=True)
class Branch:
    """A continuation of a sequence's first `prefix_length` tokens, which must be cached or run in the same pass.

    With an offset of 0, it overwrites the sequence's own later positions.
    """

    key: SequenceKey
    prefix_length: int
    offset: int
    """Shift to the right of the sequence's own positions, in logical columns."""
    token_ids: Sequence[int]
    """All tokens of the branch so far."""
    num_cached_tokens: int = 0
    """Leading tokens of the branch that are cached."""
    num_logits: int = 1
    """Number of trailing tokens that need logits. All but the first of them are a draft."""

    def span(self, slot: Slot) -> Span:
        """The span of the tokens that are not cached yet. `slot`: of the sequence."""
        start, token_ids = self.prefix_length + self.num_cached_tokens, self.token_ids[self.num_cached_tokens :]
        own_states = {0: slot.own_states[start]} if start in slot.own_states else None
        return Span(
            slot.index,
            start,
            token_ids,
            self.num_logits,
            self.prefix_length,
            self.offset,
            num_tentative=len(token_ids),
            own_states=own_states,
        )

    def rows(self, slot: Slot) -> SequenceRows:
        """The rows of logits after the last tokens. `slot`: of the sequence."""
        assert self.prefix_length <= len(slot.token_ids)
        token_ids = [*slot.token_ids[: self.prefix_length], *self.token_ids]
        return SequenceRows(slot.sampling, token_ids, self.num_logits, prefix_length=self.prefix_length)

    def draft(self, slot: Slot, num_draft_tokens: int, needs_confidences: bool) -> Draft:
        """A draft that continues the branch. `slot`: of the sequence."""
        rows = self.rows(slot)
        return Draft(
            self.span(slot),
            rows.rules,
            [*rows.token_ids],
            num_draft_tokens,
            prefix_length=self.prefix_length,
            needs_confidences=needs_confidences,
        )
