"""Sources of lookups: drafts that cost no model pass. Pure.

Each source is one class. The draft model is not a source: its worker proposes, and `DraftLengths` weighs it.
"""

from collections.abc import Iterable
from typing import Protocol

from specpool.drafting.acceptance import expected_gain
from specpool.drafting.answer_source import AnswerSource
from specpool.drafting.plans import NO_LOOKUP, DraftMethod, Lookup, LookupSource
from specpool.drafting.predictions import PredictionSource
from specpool.drafting.sequence_source import SequenceSource
from specpool.drafting.sequences import Request, Sequence

SEQUENCE, ANSWERS, PREDICTION = LookupSource.SEQUENCE, LookupSource.ANSWERS, LookupSource.PREDICTION

SOURCES = {
    DraftMethod.MODEL: frozenset[LookupSource](),
    DraftMethod.NGRAM: frozenset({SEQUENCE}),
    DraftMethod.SUFFIX: frozenset({SEQUENCE, ANSWERS}),
    DraftMethod.PREDICTION: frozenset[LookupSource](),
    DraftMethod.BEST: frozenset({SEQUENCE, ANSWERS}),
}
"""Sources of each method. A request with a prediction uses it with every method."""


class Source(Protocol):
    """Proposes draft tokens for sequences, and learns how often they are accepted."""

    def propose(self, sequence: Sequence, limit: int) -> Lookup:
        """Return at most `limit` draft tokens for a decoding sequence, or `NO_LOOKUP`.

        During prefill, return `NO_LOOKUP`; a source may index the prompt then.
        """
        ...

    def observe(self, sequence: Sequence, lookup: Lookup) -> None:
        """Learn from the tokens that a sequence has gained since the lookup, whether it was verified or not.

        Called after each commit, with `NO_LOOKUP` if this source proposed nothing or another source was chosen.
        """
        ...

    def forget(self, sequence_ids: Iterable[int]) -> None:
        """Forget sequences that have ended."""
        ...


class DraftSources:
    """All sources together. Proposes the lookup with the highest expected gain."""

    def __init__(self, store_tokens: int = 0) -> None:
        """`store_tokens`: maximum tokens of finished answers to store; 0: store none."""
        self.sequence, self.prediction = SequenceSource(), PredictionSource()
        self.answers = AnswerSource(store_tokens) if store_tokens else None
        self.by_name: dict[LookupSource, Source] = {SEQUENCE: self.sequence, PREDICTION: self.prediction}
        if self.answers is not None:
            self.by_name[ANSWERS] = self.answers

    def propose(self, sequence: Sequence, limit: int) -> Lookup:
        """Return at most `limit` draft tokens from the most promising source that the request allows."""
        if limit <= 0:
            return NO_LOOKUP
        names = _sources_of(sequence.request)
        lookups = [source.propose(sequence, limit) for name, source in self.by_name.items() if name in names]
        found = [lookup for lookup in lookups if lookup.token_ids]
        if len(found) < 2:  # the usual case, in every round of every sequence
            return found[0] if found else NO_LOOKUP
        return max(found, key=lambda lookup: expected_gain(lookup.chances))

    def observe(self, sequence: Sequence, lookup: Lookup) -> None:
        """Learn from the tokens that a sequence has gained since the lookup."""
        for name, source in self.by_name.items():
            source.observe(sequence, lookup if name is lookup.source else NO_LOOKUP)

    def index_answers(self) -> None:
        """Index some tokens of stored answers. Call once per round."""
        if self.answers is not None:
            self.answers.index_some()

    def forget(self, sequence_ids: Iterable[int]) -> None:
        gone = tuple(sequence_ids)
        for source in self.by_name.values():
            source.forget(gone)


def _sources_of(request: Request) -> frozenset[LookupSource]:
    names = SOURCES[request.method]
    return names | {PREDICTION} if request.prediction else names
