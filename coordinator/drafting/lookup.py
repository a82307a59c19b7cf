"""Prompt lookup for all sequences, and its acceptance rates. Pure."""

from collections.abc import Iterable
from dataclasses import dataclass

from coordinator.drafting.acceptance import AcceptanceRates
from coordinator.drafting.ngrams import MAX_RUN, MIN_RUN, NgramIndex
from coordinator.scheduling.sequence import DraftMethod, Sequence
from coordinator.scheduling.turn import agreement_length

# Initial acceptance rates for the shortest and the longest run.
FIRST_RATES = (0.3, 0.6)


@dataclass(frozen=True)
class Lookup:
    """Tokens that followed an earlier occurrence of a sequence's last tokens."""

    token_ids: tuple[int, ...] = ()
    run: int = 0
    """Length of the repeated run; 0 without one."""


class PromptLookup:
    """Looks up draft tokens, and learns their acceptance rate by the length of the repeated run."""

    def __init__(self) -> None:
        first, last = FIRST_RATES
        self.acceptance = {
            run: AcceptanceRates(first + (last - first) * (run - MIN_RUN) / (MAX_RUN - MIN_RUN))
            for run in range(MIN_RUN, MAX_RUN + 1)
        }
        self._indexes: dict[int, NgramIndex] = {}
        self._lookups: dict[int, Lookup] = {}

    def look_up(self, sequence: Sequence, limit: int) -> Lookup:
        """At most `limit` draft tokens for the next round; none if the request excludes prompt lookup."""
        lookup = Lookup()
        if sequence.request.method is not DraftMethod.MODEL and sequence.max_num_draft_tokens > 0:
            index = self._indexes.setdefault(sequence.sequence_id, NgramIndex())
            if sequence.is_decoding:
                lookup = Lookup(*index.propose(sequence.token_ids, limit))
            else:  # index long prompts while they are prefilled
                index.extend(sequence.token_ids)
        self._lookups[sequence.sequence_id] = lookup
        return lookup

    def rate(self, sequence: Sequence) -> float:
        """Expected acceptance rate of the last lookup; 0 if it found nothing."""
        lookup = self._lookups[sequence.sequence_id]
        return self.acceptance[lookup.run].rate(sequence.sequence_id) if lookup.token_ids else 0.0

    def observe(self, sequence_id: int, gained: tuple[int, ...]) -> None:
        """Learn from the tokens that a sequence gained, whether the lookup was verified or not."""
        lookup = self._lookups.get(sequence_id, Lookup())
        if lookup.token_ids:
            tried = min(len(lookup.token_ids), len(gained))
            self.acceptance[lookup.run].add(sequence_id, tried, agreement_length(lookup.token_ids, gained))

    def forget(self, sequence_ids: Iterable[int]) -> None:
        for sequence_id in sequence_ids:
            self._indexes.pop(sequence_id, None)
            self._lookups.pop(sequence_id, None)
            for acceptance in self.acceptance.values():
                acceptance.forget(sequence_id)
