"""N-gram index: finds earlier occurrences of the last tokens, to draft the tokens that followed. Pure."""

from array import array
from collections.abc import Sequence

# Maximum length of a repeated run; the longest wins.
MAX_RUN = 4
# Tokens to index per call. A long prompt must not stall a round.
TOKENS_PER_CALL = 512
# Search window in tokens: at least this many, at most twice as many. It bounds the memory.
MEMORY_TOKENS = 16_384
# Occurrences of the last pair to examine for a longer run, latest first.
MAX_OCCURRENCES = 64


class NgramIndex:
    """Index of one sequence, extended as it grows.

    It stores single tokens and pairs. Each pair links to its previous occurrence, and longer runs are found along these
    links.
    """

    def __init__(self) -> None:
        self._last: dict[int | tuple[int, int], int] = {}
        """By token or pair: the position after its last occurrence."""
        self._old: dict[int | tuple[int, int], int] = {}
        """The same for older ones, which are dropped after another `MEMORY_TOKENS` tokens."""
        self._previous = array("I", (0,))
        """At each position: the position after the previous occurrence of the pair before it; 0 without one."""

    def extend(self, token_ids: Sequence[int]) -> None:
        """Index the next tokens. `token_ids` must extend the tokens of the last call.

        Leaves out the last run, which is the one to look up.
        """
        start = len(self._previous)
        for end in range(start, min(len(token_ids), start + TOKENS_PER_CALL)):
            token = token_ids[end - 1]
            pair = token_ids[end - 2] if end > 1 else -1, token  # -1: there is no token before the first
            self._previous.append(self._occurrence(pair))
            self._last[pair] = self._last[token] = end
            if end % MEMORY_TOKENS == 0:
                self._last, self._old = {}, self._last

    def propose(self, token_ids: Sequence[int], k: int) -> tuple[tuple[int, ...], int]:
        """At most `k` tokens that may follow, and the length of the repeated run. `((), 0)` if no run repeats.

        `token_ids` must extend the tokens of the last call. If the run overlaps its occurrence, the proposal loops.
        """
        self.extend(token_ids)
        at, length = self._longest_run(token_ids)
        if not length or k <= 0:
            return (), 0
        period = len(token_ids) - at
        return tuple(token_ids[at + i % period] for i in range(k)), length

    def _longest_run(self, token_ids: Sequence[int]) -> tuple[int, int]:
        """Position after the occurrence of the longest run, and the length of the run; zeros without one."""
        best_at, best_length = 0, 0
        at = self._occurrence((token_ids[-2], token_ids[-1])) if len(token_ids) > 1 else 0
        if not at:
            at = self._occurrence(token_ids[-1]) if token_ids else 0
            return at, min(at, 1)
        for _ in range(MAX_OCCURRENCES):
            if not at or best_length == MAX_RUN:
                break
            length = _run_length(token_ids, at)
            if length > best_length:
                best_at, best_length = at, length
            at = self._previous[at]
        return best_at, best_length

    def _occurrence(self, run: int | tuple[int, int]) -> int:
        return self._last.get(run) or self._old.get(run, 0)


def _run_length(token_ids: Sequence[int], at: int) -> int:
    """Number of tokens before `at` that equal the last tokens, up to `MAX_RUN`. The last pair is known to."""
    length = 2
    while length < min(MAX_RUN, at) and token_ids[at - 1 - length] == token_ids[-1 - length]:
        length += 1
    return length
