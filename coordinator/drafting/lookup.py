"""Prompt lookup for all sequences: what it offers in a round, and how often such offers were right. Pure."""

from collections.abc import Iterable
from dataclasses import dataclass

from coordinator.drafting.acceptance import AcceptanceOfAll
from coordinator.drafting.ngrams import LONGEST_RUN, SHORTEST_RUN, NgramIndex
from coordinator.scheduling.sequence import DraftMethod, Sequence
from coordinator.scheduling.turn import agreeing

# Acceptance rates believed of prompt lookup before it was tried, for the shortest run and for the longest.
FIRST_RATES = (0.3, 0.6)


@dataclass(frozen=True)
class Lookup:
    """What followed the last tokens of a sequence when they came before."""

    token_ids: tuple[int, ...] = ()
    run: int = 0
    """The number of tokens that came before; 0 if none did."""


class PromptLookup:
    """Looks up draft tokens, and learns how often they are right, by the length of the run that came before."""

    def __init__(self) -> None:
        first, last = FIRST_RATES
        self.acceptance = {
            run: AcceptanceOfAll(first + (last - first) * (run - SHORTEST_RUN) / (LONGEST_RUN - SHORTEST_RUN))
            for run in range(SHORTEST_RUN, LONGEST_RUN + 1)
        }
        self._indexes: dict[int, NgramIndex] = {}
        self._lookups: dict[int, Lookup] = {}

    def look_up(self, sequence: Sequence, limit: int) -> Lookup:
        """At most `limit` draft tokens for the next round; none if the request rules them out."""
        lookup = Lookup()
        if sequence.request.method is not DraftMethod.MODEL and sequence.max_num_draft_tokens > 0:
            index = self._indexes.setdefault(sequence.sequence_id, NgramIndex())
            if sequence.is_decoding:
                lookup = Lookup(*index.propose(sequence.token_ids, limit))
            else:  # a long prompt takes many rounds to prefill, and as many to index
                index.extend(sequence.token_ids)
        self._lookups[sequence.sequence_id] = lookup
        return lookup

    def rate(self, sequence: Sequence) -> float:
        """The rate at which the tokens looked up last are expected to be accepted; 0 without tokens."""
        lookup = self._lookups[sequence.sequence_id]
        return self.acceptance[lookup.run].rate(sequence.sequence_id) if lookup.token_ids else 0.0

    def observe(self, sequence_id: int, gained: tuple[int, ...]) -> None:
        """Learns from the tokens that a sequence gained, whether the lookup was verified or not."""
        lookup = self._lookups.get(sequence_id, Lookup())
        if lookup.token_ids:
            tried = min(len(lookup.token_ids), len(gained))
            self.acceptance[lookup.run].add(sequence_id, tried, agreeing(lookup.token_ids, gained))

    def forget(self, sequence_ids: Iterable[int]) -> None:
        """Drops what is known of sequences that have ended."""
        for sequence_id in sequence_ids:
            self._indexes.pop(sequence_id, None)
            self._lookups.pop(sequence_id, None)
            for acceptance in self.acceptance.values():
                acceptance.forget(sequence_id)
