"""Lookups in a sequence's own tokens. Pure."""

from collections.abc import Iterable

from specpool.drafting.plans import NO_LOOKUP, Lookup, LookupSource
from specpool.drafting.sequences import Sequence
from specpool.drafting.suffixes import SuffixIndex
from specpool.drafting.votes import VoteRates


class SequenceSource:
    """Proposes the tokens that followed earlier occurrences of a sequence's last tokens."""

    def __init__(self) -> None:
        self.rates = VoteRates(LookupSource.SEQUENCE)
        self._indexes: dict[int, SuffixIndex] = {}

    def propose(self, sequence: Sequence, limit: int) -> Lookup:
        """See `Source`. Indexes long prompts during prefill."""
        index = self._indexes.setdefault(sequence.sequence_id, SuffixIndex())
        if not sequence.is_decoding:
            index.extend(sequence.token_ids)
            return NO_LOOKUP
        return self.rates.vote(sequence, index.matches(sequence.token_ids, limit), limit)

    def observe(self, sequence: Sequence, lookup: Lookup) -> None:
        """See `Source`."""
        self.rates.observe(sequence, lookup)

    def forget(self, sequence_ids: Iterable[int]) -> None:
        """See `Source`."""
        sequence_ids = tuple(sequence_ids)
        self.rates.forget(sequence_ids)
        for sequence_id in sequence_ids:
            self._indexes.pop(sequence_id, None)
