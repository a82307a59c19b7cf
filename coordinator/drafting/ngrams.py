"""Drafts without a model: what followed the last tokens when they came before (prompt lookup). Pure."""

from collections.abc import Sequence

# Runs of tokens that are looked up, the longest first.
LONGEST_RUN, SHORTEST_RUN = 4, 2


class NgramIndex:
    """Where runs of tokens ended last in one sequence, kept up as it grows."""

    def __init__(self) -> None:
        self._after: dict[tuple[int, ...], int] = {}
        """By run: the position behind its last occurrence."""
        self._indexed = 0

    def propose(self, token_ids: Sequence[int], k: int) -> tuple[tuple[int, ...], int]:
        """At most `k` tokens that may follow, and the length of the run that says so; none and 0 if no run came before.

        `token_ids` begins with those of the last call. What follows a run that came just before repeats itself.
        """
        self._index(token_ids)
        for length in range(min(LONGEST_RUN, len(token_ids)), SHORTEST_RUN - 1, -1):
            at = self._after.get(tuple(token_ids[-length:]))
            if at is not None and k > 0:
                period = len(token_ids) - at
                return tuple(token_ids[at + i % period] for i in range(k)), length
        return (), 0

    def _index(self, token_ids: Sequence[int]) -> None:
        """Notes all runs but those that end with the last token, which are to be looked up."""
        for end in range(max(1, self._indexed), len(token_ids)):
            for length in range(SHORTEST_RUN, min(LONGEST_RUN, end) + 1):
                self._after[tuple(token_ids[end - length : end])] = end
        self._indexed = max(1, len(token_ids))
