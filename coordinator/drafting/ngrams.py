"""Prompt lookup: drafting, without a model, the tokens that followed the last tokens when they came before. Pure."""

from array import array
from collections.abc import Sequence

# Lengths of the runs of tokens that are looked up, the longest first.
LONGEST_RUN, SHORTEST_RUN = 4, 2
# Tokens indexed in one call: a long prompt is indexed over many rounds, so that no round waits for it.
INDEXED_A_CALL = 512
# Runs are found within at least this number of last tokens, and at most twice as many. Earlier tokens are forgotten, to
# bound the memory.
TOKENS_KEPT = 16_384
# Occurrences of the last two tokens that are looked at for a longer run, the last one first.
MOST_LOOKED_AT = 64


class NgramIndex:
    """Index of where each run of tokens occurred in one sequence, extended as the sequence grows.

    It knows pairs of tokens, and for each occurrence of a pair the one before it; longer runs are found among these.
    """

    def __init__(self) -> None:
        self._last: dict[tuple[int, int], int] = {}
        """By pair: the position after its last occurrence."""
        self._last_of_older: dict[tuple[int, int], int] = {}
        """The same, for tokens before the last `TOKENS_KEPT` or so."""
        self._previous = array("I", (0, 0))
        """At each position: the position after the previous occurrence of the pair that ends before it, 0 if none."""

    def extend(self, token_ids: Sequence[int]) -> None:
        """Indexes the next tokens. `token_ids` begins with those of the last call.

        The run that ends with the last token is left out: it is to be looked up.
        """
        start = len(self._previous)
        for end in range(start, min(len(token_ids), start + INDEXED_A_CALL)):
            pair = token_ids[end - 2], token_ids[end - 1]
            self._previous.append(self._occurrence(pair))
            self._last[pair] = end
            if end % TOKENS_KEPT == 0:
                self._last, self._last_of_older = {}, self._last

    def propose(self, token_ids: Sequence[int], k: int) -> tuple[tuple[int, ...], int]:
        """At most `k` tokens that may follow, and the length of the run that came before; no tokens and 0 if none did.

        `token_ids` begins with those of the last call. If the run overlaps its occurrence, the tokens between repeat.
        """
        self.extend(token_ids)
        at, length = self._longest_run(token_ids)
        if not length or k <= 0:
            return (), 0
        period = len(token_ids) - at
        return tuple(token_ids[at + i % period] for i in range(k)), length

    def _longest_run(self, token_ids: Sequence[int]) -> tuple[int, int]:
        """The position after the occurrence of the longest run of last tokens, and the run's length; 0 and 0 if there
        is none."""
        if len(token_ids) < SHORTEST_RUN:
            return 0, 0
        best, longest = 0, 0
        at = self._occurrence((token_ids[-2], token_ids[-1]))
        for _ in range(MOST_LOOKED_AT):
            if not at or longest == LONGEST_RUN:
                break
            length = _common_length(token_ids, at)
            if length > longest:
                best, longest = at, length
            at = self._previous[at]
        return best, longest

    def _occurrence(self, pair: tuple[int, int]) -> int:
        return self._last.get(pair) or self._last_of_older.get(pair, 0)


def _common_length(token_ids: Sequence[int], at: int) -> int:
    """The number of tokens before position `at` that equal the last tokens: at least `SHORTEST_RUN`, which are known to
    be equal, and at most `LONGEST_RUN`."""
    length = SHORTEST_RUN
    while length < min(LONGEST_RUN, at) and token_ids[at - 1 - length] == token_ids[-1 - length]:
        length += 1
    return length
