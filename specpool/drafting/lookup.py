"""Prompt lookup for all sequences, and its acceptance rates. Pure."""

from collections.abc import Iterable
from functools import partial

from specpool.drafting.acceptance import FIRST_RATE, AcceptanceRates, agreement_length, expected_tokens
from specpool.drafting.answers import MIN_RUN, AnswerStore
from specpool.drafting.ngrams import MAX_RUN, NgramIndex
from specpool.drafting.plans import NO_LOOKUP, DraftMethod, Lookup, LookupSource
from specpool.drafting.sequences import Request, Sequence


class PromptLookup:
    """Looks up draft tokens, and learns their acceptance rate by source and by length of the repeated run."""

    def __init__(self, store_tokens: int = 0) -> None:
        """`store_tokens`: maximum tokens of finished answers to keep; 0: keep none."""
        runs = range(1, MAX_RUN + 1)  # longer ones mislead less
        self.acceptance = {s: {run: AcceptanceRates(FIRST_RATE * run / MAX_RUN) for run in runs} for s in LookupSource}
        self._answers = AnswerStore(store_tokens) if store_tokens else None
        self._indexes: dict[int, NgramIndex] = {}

    def look_up(self, sequence: Sequence, limit: int) -> Lookup:
        """At most `limit` draft tokens from the more promising source; none if the request excludes prompt lookup."""
        request = sequence.request
        if request.method is DraftMethod.MODEL or limit <= 0:
            return NO_LOOKUP
        index = self._indexes.setdefault(sequence.sequence_id, NgramIndex())
        if not sequence.is_decoding:  # index long prompts while they are prefilled
            index.extend(sequence.token_ids)
            return NO_LOOKUP
        found = [(LookupSource.SEQUENCE, *index.propose(sequence.token_ids, limit))]
        if self._answers is not None and _shares_answers(request):
            found.append((LookupSource.ANSWERS, *self._answers.propose(request.namespace, sequence.token_ids, limit)))
        # Requests with a fixed length draft whether it pays or not, and after a run of one token it rarely does.
        min_run, length = 1 if request.adaptive else MIN_RUN, len(sequence.token_ids)
        lookups = [Lookup(token_ids, run, source, length) for source, token_ids, run in found if run >= min_run]
        if len(lookups) < 2:  # the usual case, in every round of every sequence
            return lookups[0] if lookups else NO_LOOKUP
        return max(lookups, key=partial(self._expected_tokens, sequence.sequence_id))

    def rate(self, sequence_id: int, lookup: Lookup) -> float:
        """Expected acceptance rate of a lookup; 0 if it found nothing."""
        return self.acceptance[lookup.source][lookup.run].rate(sequence_id) if lookup.run else 0.0

    def observe(self, sequence: Sequence, lookup: Lookup) -> None:
        """Learn from the tokens that a sequence gained since the lookup, whether it was verified or not."""
        if lookup.run:
            gained = tuple(sequence.token_ids[lookup.start : lookup.start + len(lookup.token_ids)])
            accepted = agreement_length(lookup.token_ids, gained)
            self.acceptance[lookup.source][lookup.run].add(sequence.sequence_id, len(gained), accepted)

    def store_answer(self, sequence: Sequence) -> None:
        """Keep the answer of a sequence that has finished, if its request allows it.

        It includes the last tokens of the prompt, so that the first tokens of a repeated answer can be drafted.
        """
        if self._answers is not None and sequence.is_complete and _shares_answers(sequence.request):
            start = max(0, sequence.prompt_length - MAX_RUN)
            self._answers.add(sequence.request.namespace, sequence.token_ids[start:])

    def index_answers(self) -> None:
        """Index some tokens of stored answers. Call it once per round."""
        if self._answers is not None:
            self._answers.index_some()

    def forget(self, sequence_ids: Iterable[int]) -> None:
        rates = [rates for by_run in self.acceptance.values() for rates in by_run.values()]
        for sequence_id in sequence_ids:
            self._indexes.pop(sequence_id, None)
            for acceptance in rates:
                acceptance.forget(sequence_id)

    def _expected_tokens(self, sequence_id: int, lookup: Lookup) -> float:
        return expected_tokens(self.rate(sequence_id, lookup), len(lookup.token_ids))


def _shares_answers(request: Request) -> bool:
    """Whether a request uses the answer store. Repeats are faster, which users who share a salt can measure."""
    return request.cache_salt != ""
