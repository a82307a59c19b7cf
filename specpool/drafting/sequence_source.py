"""The source that repeats a sequence's own tokens. Pure."""

from collections.abc import Iterable

from specpool.drafting.ngrams import NgramIndex
from specpool.drafting.plans import NO_LOOKUP, Lookup, LookupSource
from specpool.drafting.run_rates import RunRates, min_run
from specpool.drafting.sequences import Sequence


class SequenceSource:
    """Proposes the tokens that followed an earlier occurrence of a sequence's last tokens."""

    def __init__(self) -> None:
        self.rates = RunRates()
        self._indexes: dict[int, NgramIndex] = {}

    def propose(self, sequence: Sequence, limit: int) -> Lookup:
        """See `Source`. Indexes long prompts while they are prefilled."""
        index = self._indexes.setdefault(sequence.sequence_id, NgramIndex())
        if not sequence.is_decoding:
            index.extend(sequence.token_ids)
            return NO_LOOKUP
        token_ids, run = index.propose(sequence.token_ids, limit)
        if run < min_run(sequence):
            return NO_LOOKUP
        chances = self.rates.chances(sequence.sequence_id, run, len(token_ids))
        return Lookup(token_ids, chances, LookupSource.SEQUENCE, run, len(sequence.token_ids))

    def observe(self, sequence: Sequence, lookup: Lookup) -> None:
        """See `Source`."""
        if lookup.run:
            self.rates.observe(sequence, lookup)

    def forget(self, sequence_ids: Iterable[int]) -> None:
        """See `Source`."""
        sequence_ids = tuple(sequence_ids)
        self.rates.forget(sequence_ids)
        for sequence_id in sequence_ids:
            self._indexes.pop(sequence_id, None)
