"""Prompt lookup: drafting, without a model, the tokens that followed the last tokens when they came before. Pure."""

from collections.abc import Sequence

# Lengths of the runs of tokens that are looked up, the longest first.
LONGEST_RUN, SHORTEST_RUN = 4, 2


class NgramIndex:
    """Index of where each run of tokens ended last in one sequence, extended as the sequence grows."""

    def __init__(self) -> None:
        self._after: dict[tuple[int, ...], int] = {}
        """By run: the position after its last occurrence."""
        self._indexed = 0

    def propose(self, token_ids: Sequence[int], k: int) -> tuple[tuple[int, ...], int]:
        """At most `k` tokens that may follow, and the length of the run that came before; no tokens and 0 if none did.

        `token_ids` begins with those of the last call. If the run overlaps its occurrence, the tokens between repeat.
        """
        self._index(token_ids)
        for length in range(min(LONGEST_RUN, len(token_ids)), SHORTEST_RUN - 1, -1):
            at = self._after.get(tuple(token_ids[-length:]))
            if at is not None and k > 0:
                period = len(token_ids) - at
                return tuple(token_ids[at + i % period] for i in range(k)), length
        return (), 0

    def _index(self, token_ids: Sequence[int]) -> None:
        """Indexes all runs but those that end with the last token, which are to be looked up."""
        for end in range(max(1, self._indexed), len(token_ids)):
            for length in range(SHORTEST_RUN, min(LONGEST_RUN, end) + 1):
                self._after[tuple(token_ids[end - length : end])] = end
        self._indexed = max(1, len(token_ids))
