"""Lookups in earlier answers of the request's namespace. Pure."""

from collections.abc import Iterable

from specpool.drafting.answers import AnswerStore
from specpool.drafting.plans import NO_LOOKUP, Lookup, LookupSource
from specpool.drafting.sequences import Request, Sequence
from specpool.drafting.votes import VoteRates

# Tokens of the prompt to keep with an answer, so that the first tokens of a repeated answer can be drafted.
PROMPT_TOKENS = 8


class AnswerSource:
    """Proposes the tokens that followed the last tokens of a sequence in earlier answers."""

    def __init__(self, max_tokens: int) -> None:
        """`max_tokens`: see `AnswerStore`."""
        self.rates = VoteRates(LookupSource.ANSWERS)
        self._store = AnswerStore(max_tokens)

    def propose(self, sequence: Sequence, limit: int) -> Lookup:
        """See `Source`."""
        if not sequence.is_decoding or not _shares_answers(sequence.request):
            return NO_LOOKUP
        matches = self._store.matches(sequence.request.namespace, sequence.token_ids, limit)
        return self.rates.vote(sequence, matches, limit)

    def observe(self, sequence: Sequence, lookup: Lookup) -> None:
        """See `Source`. Also store the answer of a completed sequence, if its request allows it."""
        self.rates.observe(sequence, lookup)
        if sequence.is_complete and _shares_answers(sequence.request):
            start = max(0, sequence.prompt_length - PROMPT_TOKENS)
            self._store.add(sequence.request.namespace, sequence.token_ids[start:])

    def index_some(self) -> None:
        """Index some tokens of new answers. Call once per round."""
        self._store.index_some()

    def forget(self, sequence_ids: Iterable[int]) -> None:
        """See `Source`."""
        self.rates.forget(sequence_ids)


def _shares_answers(request: Request) -> bool:
    """Whether a request uses the answer store. Repeats are faster, so users who share a salt can detect them."""
    return request.cache_salt != ""
