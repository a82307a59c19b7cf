"""Chooses what drafts for each batch, and the batch to recommend. Pure."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from specpool.drafting.ledger import MIN_GAIN
from specpool.drafting.plans import DraftMethod
from specpool.planning.prediction import Speed
from specpool.planning.rounds import SourceSpeed

# A batch is large enough once it reaches this share of the highest throughput of any batch.
SUFFICIENT = 0.95
# Gain that is not worth another draft method: a simulation is only about as precise.
NEGLIGIBLE = 0.02


@dataclass(frozen=True)
class Choice:
    """The recommended way to generate a batch."""

    batch: int
    method: DraftMethod | None
    """None: plain decoding."""
    k: int
    """Draft tokens of the model for a sequence in a round; 0 if it does not draft."""
    tokens_per_second: float
    of_plain: float
    """Relative to plain decoding."""


def choose(best: Speed, sources: Sequence[SourceSpeed]) -> Choice:
    """Choose the fastest method, unless one that needs less, or the server's default, is about as fast.

    `best`: the fastest fixed number of draft tokens. `sources`: of the same batch; empty if nothing else is known.
    """
    if not sources:
        method = DraftMethod.MODEL if best.k else None
        return Choice(best.batch, method, best.k, best.tokens_per_second, best.of_plain)
    choices = {None: Choice(best.batch, None, 0, best.tokens_per_second / best.of_plain, 1.0)} | {
        each.method: Choice(
            best.batch, each.method, max(1, best.k) * (each.from_model > 0), each.tokens_per_second, each.of_plain
        )
        for each in sources
    }
    fastest = max(choices.values(), key=lambda choice: choice.tokens_per_second)
    tolerated = {None: NEGLIGIBLE, DraftMethod.NGRAM: NEGLIGIBLE, DraftMethod.BEST: MIN_GAIN}
    similar = (
        choices[method]
        for method, loss in tolerated.items()
        if choices[method].tokens_per_second >= fastest.tokens_per_second * (1 - loss)
    )
    return next(similar, fastest)


def smallest_sufficient(choices: Iterable[Choice]) -> Choice:
    """Return the smallest batch that reaches 95% of the highest throughput."""
    by_batch = sorted(choices, key=lambda choice: choice.batch)
    maximum = max(choice.tokens_per_second for choice in by_batch)
    return next(choice for choice in by_batch if choice.tokens_per_second >= SUFFICIENT * maximum)
