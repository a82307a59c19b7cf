"""Branches: drafts for the most probable outcomes of a verification, made while it runs.

One pass appends the tokens that are being verified and ranks the tokens that the target may choose. Each further pass
extends all branches by a token. They share the cache of their sequence, in positions that it does not use yet.
"""

from collections.abc import Iterator, Mapping, Sequence

from draft_worker.features import states_of
from draft_worker.outcomes import Outcome, most_probable
from specpool.engine.cache.slots import SequenceKey
from specpool.engine.cache.spans import Span
from specpool.engine.passes.drafts import Draft, DraftRound
from specpool.engine.run.branches import Branch
from specpool.engine.run.sequences import SequenceEngine
from specpool.engine.sampling.ranking import Ranking
from specpool.protocol import rounds
from specpool.protocol.rounds import ProposeItem

# Maximum tokens to rank after each position. Lower ranks are rarely right.
MAX_RANKED = 5
# Maximum rows of sampled sequences to rank in a round: unlike greedy ones, they are ranked one by one.
MAX_SAMPLED_ROWS = 32


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
        yield key, engine.span(key, item.token_ids, num_logits, states)


def _outlined(
    engine: SequenceEngine, key: SequenceKey, item: ProposeItem, rankings: Sequence[Ranking], chances: Sequence[float]
) -> Iterator[tuple[Outcome, Draft]]:
    """Return the outcomes and drafts of a sequence's branches, as many as its extent has room for."""
    end, length, slots = item.end, item.num_draft_tokens, engine.engine.slots
    max_length = engine.engine.max_model_len
    slots.grow(key, min(end + item.num_branches * length, max_length), evicts=False)
    room = (min(slots[key].capacity, max_length) - end) // length
    unverified = item.token_ids[len(item.token_ids) - item.num_unverified :]
    outcomes = most_probable(rankings, unverified, chances, len(rankings) * MAX_RANKED)
    if not engine.engine.supports_branches:  # the sequence's own positions hold one branch
        outcomes, room = [outcome for outcome in outcomes if outcome.num_accepted == item.num_unverified], min(1, room)
    for index, outcome in enumerate(outcomes[: min(item.num_branches, room)]):
        prefix_length = end - item.num_unverified + outcome.num_accepted
        offset = end + index * length - prefix_length
        branch = Branch(key, prefix_length, offset, (outcome.token_id,))
        yield outcome, branch.draft(slots[key], length, bool(item.min_chance))
