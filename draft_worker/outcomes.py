"""Ranks outcomes of a verification by the draft's own probabilities. Pure.

An outcome is the number of accepted tokens, and the target's token after them.
"""

import heapq
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from specpool.engine.passes.drafts import acceptance_chance
from specpool.engine.sampling.ranking import Ranking


class Outcome(NamedTuple):
    """An outcome and its estimated probability."""

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
