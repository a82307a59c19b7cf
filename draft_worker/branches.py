"""Branches: drafts for the most probable outcomes of a verification, made while it runs.

One pass appends the tokens that are being verified and ranks the tokens that the target may choose. Each further pass
extends all branches by a token. They share the cache of their sequence, and use positions that it does not need yet.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from draft_worker.outcomes import Outcome, most_probable
from specpool.engine.cache.slots import SequenceKey
from specpool.engine.cache.spans import Span
from specpool.engine.run.branches import Branch
from specpool.engine.run.sequences import SequenceEngine
from specpool.engine.sampling.ranking import Ranking
from specpool.protocol import rounds
from specpool.protocol.rounds import ProposeItem

# Maximum tokens to rank after each position. Lower ranks are rarely right.
MAX_RANKED = 5
# Maximum rows of sampled sequences to rank in a round: unlike greedy ones, they are ranked one by one.
MAX_SAMPLED_ROWS = 32


@dataclass
class _Growing:
    """An unfinished branch."""

    key: SequenceKey
    item: ProposeItem
    outcome: Outcome
    prefix_length: int
    offset: int
    token_ids: list[int]
    """The token of the outcome and the draft tokens after it."""
    confidences: list[float] = field(default_factory=list)

    @property
    def branch(self) -> Branch:
        """The branch as the engine sees it; the last token runs next."""
        cached = len(self.token_ids) - 1
        return Branch(self.key, self.prefix_length, self.offset, self.token_ids, num_cached_tokens=cached)

    @property
    def wants_more(self) -> bool:
        return len(self.token_ids) <= self.item.num_draft_tokens

    def result(self) -> rounds.Branch:
        confidences = tuple(self.confidences) if self.item.min_chance else ()
        return rounds.Branch(self.outcome.num_accepted, self.outcome.token_id, tuple(self.token_ids[1:]), confidences)


def draft_branches(
    engine: SequenceEngine, items: Mapping[SequenceKey, ProposeItem], chances: Mapping[SequenceKey, Sequence[float]]
) -> dict[SequenceKey, tuple[rounds.Branch, ...]]:
    """Append the tokens of each item, and draft its branches. `chances`: see `ProposeRound`."""
    if not items:
        return {}
    spans = dict(_appending(engine, items))
    rankings = engine.rank(spans, MAX_RANKED)
    for key, span in spans.items():
        engine.keep(key, span.end)
    growing = {key: _outlined(engine, key, item, rankings[key], chances[key]) for key, item in items.items()}
    _grow(engine, [branch for own in growing.values() for branch in own])
    return {key: tuple(branch.result() for branch in own) for key, own in growing.items()}


def _appending(engine: SequenceEngine, items: Mapping[SequenceKey, ProposeItem]) -> Iterator[tuple[SequenceKey, Span]]:
    """The spans that append the tokens of the items. Without logits, a sequence gets no branches."""
    sampled_rows = 0
    for key, item in items.items():
        num_logits = item.num_unverified + 1
        if engine.engine.slots[key].sampling is not None:
            sampled_rows += num_logits
            num_logits = 0 if sampled_rows > MAX_SAMPLED_ROWS else num_logits
        yield key, engine.span(key, item.token_ids, num_logits)


def _outlined(
    engine: SequenceEngine, key: SequenceKey, item: ProposeItem, rankings: Sequence[Ranking], chances: Sequence[float]
) -> list[_Growing]:
    """The branches of a sequence, as many as its extent has room for, without draft tokens."""
    end, length, slots = item.end, item.num_draft_tokens, engine.engine.slots
    max_length = engine.engine.max_model_len
    slots.grow(key, min(end + item.num_branches * length, max_length), evicts=False)
    room = (min(slots[key].capacity, max_length) - end) // length
    unverified = item.token_ids[len(item.token_ids) - item.num_unverified :]
    outcomes = most_probable(rankings, unverified, chances, len(rankings) * MAX_RANKED)
    if not engine.engine.supports_branches:  # the sequence's own positions hold one branch
        outcomes, room = [outcome for outcome in outcomes if outcome.num_accepted == item.num_unverified], min(1, room)
    branches = []
    for index, outcome in enumerate(outcomes[: min(item.num_branches, room)]):
        prefix_length = end - item.num_unverified + outcome.num_accepted
        offset = end + index * length - prefix_length
        branches.append(_Growing(key, item, outcome, prefix_length, offset, [outcome.token_id]))
    return branches


def _grow(engine: SequenceEngine, branches: Sequence[_Growing]) -> None:
    """Draft the tokens of all branches: all at once if the device can, otherwise step by step."""
    sampled = any(engine.engine.slots[branch.key].sampling is not None for branch in branches)
    if branches and engine.engine.drafts_ahead and not sampled:
        spans = [branch.branch.span(engine.engine.slots[branch.key]) for branch in branches]
        drafted = engine.engine.draft(spans, [branch.item.num_draft_tokens for branch in branches])
        for branch, tokens, probabilities in zip(branches, *drafted, strict=True):
            count = next((i for i, value in enumerate(probabilities) if not math.isfinite(value)), len(tokens))
            branch.token_ids.extend(tokens[:count])
            branch.confidences = probabilities[:count]
        return
    growing = list(branches)
    while growing:
        choices = engine.choose_branches(
            [branch.branch for branch in growing], any(branch.item.min_chance for branch in growing)
        )
        alive = [
            (branch, chosen)
            for branch, chosen in zip(growing, choices, strict=True)
            if chosen.finite and all(map(math.isfinite, chosen.confidences))
        ]
        for branch, chosen in alive:
            branch.token_ids.extend(chosen.token_ids)
            branch.confidences.extend(chosen.confidences)
        growing = [branch for branch, _ in alive if branch.wants_more]
