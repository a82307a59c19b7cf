"""Branches: drafts for the most probable outcomes of a verification, made while it runs.

One pass appends the tokens that are being verified and ranks the tokens that the target may choose. Each further pass
extends all branches by a token. They share the cache of their sequence, in positions that it does not use yet.
"""

import heapq
import logging
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import NamedTuple

import torch
from torch.nn.functional import pad

from specpool.engine.cache.slots import SequenceKey
from specpool.engine.cache.spans import Span
from specpool.engine.models.draft_parts import Features
from specpool.engine.passes.drafts import Branch, Draft, DraftRound, acceptance_chance
from specpool.engine.run.sequences import SequenceEngine
from specpool.engine.sampling.ranking import Ranking
from specpool.protocol import rounds
from specpool.protocol.rounds import ProposeItem

log = logging.getLogger(__name__)

# Maximum tokens to rank after each position. Lower ranks are rarely right.
MAX_RANKED = 5
# Maximum rows of sampled sequences to rank in a round: unlike greedy ones, they are ranked one by one.
MAX_SAMPLED_ROWS = 32


def states_of(
    item: ProposeItem, features: Features | None, following: int = 0, given: torch.Tensor | None = None
) -> torch.Tensor | None:
    """Return the states before an item's last committed tokens, [n, width], with zeros for the tokens that follow.

    `following`: number of unverified or forced tokens after the committed ones. `given`: states that replace the
    item's, possibly for more tokens. None if the item has no states, or non-finite ones: a draft without states still
    works, only worse, so malformed states are ignored.
    """
    if given is not None:
        given = given[max(0, len(given) - len(item.token_ids)) :]
        return pad(given, (0, 0, 0, following)) if following else given
    if features is None or not item.features:
        return None
    count, rest = divmod(len(item.features), features.width * torch.bfloat16.itemsize)
    if not rest and count <= len(item.token_ids) - item.num_unverified:
        numbers = torch.frombuffer(bytearray(item.features), dtype=torch.bfloat16).float()
        if numbers.isfinite().all():  # others would spoil the sequence's cache
            return pad(numbers.view(count, features.width), (0, 0, 0, following))
    _warn(features.width)
    return None


def num_tentative(item: ProposeItem) -> int:
    """Return the number of an item's tokens that the next item may not keep.

    The next item begins at or after the last committed token, which may have to run again for its logits.
    """
    return item.num_unverified + (len(item.token_ids) - item.num_unverified > 1)


@cache
def _warn(width: int) -> None:
    log.warning("ignoring features that are not rows of %d finite bfloat16 numbers for the last tokens", width)


class Outcome(NamedTuple):
    """An outcome: number of accepted tokens, the target's next token, and the estimated probability."""

    num_accepted: int
    token_id: int
    chance: float


def most_probable(
    rankings: Sequence[Ranking], unverified: Sequence[int], chances: Sequence[float], count: int
) -> list[Outcome]:
    """Return at most `count` outcomes of verifying the tokens `unverified`, most probable first.

    `rankings`: the draft's most probable tokens in place of each of these tokens, and after the last one.
    """
    return heapq.nlargest(count, _outcomes(rankings, unverified, chances), key=lambda outcome: outcome.chance)


def _outcomes(rankings: Sequence[Ranking], unverified: Sequence[int], chances: Sequence[float]) -> Iterator[Outcome]:
    reached = 1.0
    for num_accepted, ranking in enumerate(rankings):
        probabilities = dict(ranking)
        is_end = num_accepted == len(unverified)
        # The token that the target chooses if the draft is right.
        first = next(iter(probabilities), None) if is_end else unverified[num_accepted]
        confidence = 0.0 if first is None else min(1.0, probabilities.pop(first, 0.0))
        right = acceptance_chance(confidence, chances)
        if is_end and first is not None:
            yield Outcome(num_accepted, first, reached * right)
        rest = reached * (1 - right) / max(1e-9, 1 - confidence)
        yield from (Outcome(num_accepted, token, rest * chance) for token, chance in probabilities.items())
        reached *= right


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
    branches = {key: [*_outlined(engine, key, item, rankings[key], chances[key])] for key, item in items.items()}
    engine.draft([DraftRound([draft for own in branches.values() for _, draft in own])])
    return {
        key: tuple(
            rounds.Branch(outcome.num_accepted, outcome.token_id, tuple(draft.token_ids), tuple(draft.confidences))
            for outcome, draft in own
        )
        for key, own in branches.items()
    }


def _appending(engine: SequenceEngine, items: Mapping[SequenceKey, ProposeItem]) -> Iterator[tuple[SequenceKey, Span]]:
    """Build the spans that append the items' tokens. Without logits, a sequence gets no branches."""
    sampled_rows = 0
    for key, item in items.items():
        num_logits = item.num_unverified + 1
        if engine.engine.slots[key].sampling is not None:
            sampled_rows += num_logits
            num_logits = 0 if sampled_rows > MAX_SAMPLED_ROWS else num_logits
        states = states_of(item, engine.engine.loaded.features, following=item.num_unverified)
        yield key, engine.span(key, item.token_ids, num_logits, states, num_tentative=num_tentative(item))


def _outlined(
    engine: SequenceEngine, key: SequenceKey, item: ProposeItem, rankings: Sequence[Ranking], chances: Sequence[float]
) -> Iterator[tuple[Outcome, Draft]]:
    """Return the outcomes and drafts of a sequence's branches, as many as its pages allow."""
    end, length, slots = item.end, item.num_draft_tokens, engine.engine.slots
    max_length = engine.engine.max_model_len
    slots.grow(key, min(end + item.num_branches * length, max_length), evicts=False)
    room = (min(slots.capacity(slots[key]), max_length) - end) // length
    unverified = item.token_ids[len(item.token_ids) - item.num_unverified :]
    outcomes = most_probable(rankings, unverified, chances, len(rankings) * MAX_RANKED)
    if not engine.engine.supports_branches:  # the sequence's own positions hold one branch
        outcomes, room = [outcome for outcome in outcomes if outcome.num_accepted == item.num_unverified], min(1, room)
    for index, outcome in enumerate(outcomes[: min(item.num_branches, room)]):
        prefix_length = end - item.num_unverified + outcome.num_accepted
        offset = end + index * length - prefix_length
        branch = Branch(key, prefix_length, offset, (outcome.token_id,))
        yield outcome, branch.draft(slots[key], length, bool(item.min_chance))
