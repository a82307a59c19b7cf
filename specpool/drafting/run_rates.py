"""Acceptance rates of lookups, by the length of the run that repeats. Pure."""

from collections.abc import Iterable

from specpool.drafting.acceptance import FIRST_RATE, AcceptanceRates, agreement_length
from specpool.drafting.ngrams import MAX_RUN
from specpool.drafting.plans import Lookup
from specpool.drafting.sequences import Sequence

# Minimum run of requests with a fixed length. They draft whether it pays or not, and after one token it rarely does.
MIN_FIXED_RUN = 2


class RunRates:
    """Acceptance rates of one source. Longer runs mislead less."""

    def __init__(self) -> None:
        self.by_run = {run: AcceptanceRates(FIRST_RATE * run / MAX_RUN) for run in range(1, MAX_RUN + 1)}

    def chances(self, sequence_id: int, run: int, num_tokens: int) -> tuple[float, ...]:
        """Acceptance probability of each token after a run of this length, if all before it are accepted."""
        return (self.by_run[run].rate(sequence_id),) * num_tokens

    def observe(self, sequence: Sequence, lookup: Lookup) -> None:
        """Learn from the tokens that a sequence gained since the lookup, whether it was verified or not."""
        gained = tuple(sequence.token_ids[lookup.start : lookup.start + len(lookup.token_ids)])
        accepted = agreement_length(lookup.token_ids, gained)
        self.by_run[lookup.run].add(sequence.sequence_id, len(gained), accepted)

    def forget(self, sequence_ids: Iterable[int]) -> None:
        for sequence_id in sequence_ids:
            for rates in self.by_run.values():
                rates.forget(sequence_id)


def min_run(sequence: Sequence) -> int:
    """Minimum run after which to draft for a sequence."""
    return 1 if sequence.request.adaptive else MIN_FIXED_RUN
