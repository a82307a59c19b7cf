"""Suffix index that finds the longest earlier occurrences of a sequence's last tokens. Pure."""

from array import array
from collections.abc import Sequence
from itertools import cycle, islice
from operator import itemgetter

from specpool.drafting.votes import Match, match_length

# Tokens to index per call. A long prompt must not stall a round.
TOKENS_PER_CALL = 512
# Minimum search window in tokens; the maximum is twice as many. Bounds memory.
MEMORY_TOKENS = 16_384
# Occurrences of the last pair and of the last token to examine, latest first.
MAX_PAIRS, MAX_SINGLES = 16, 8


class SuffixIndex:
    """Index of one sequence, extended as the sequence grows.

    Each token and each pair of tokens links to its previous occurrence. Searches follow these links.
    """

    def __init__(self) -> None:
        self._last: dict[int | tuple[int, int], int] = {}
        """Position after the last occurrence, by token or pair."""
        self._old: dict[int | tuple[int, int], int] = {}
        """Older occurrences, dropped after another `MEMORY_TOKENS` tokens."""
        self._singles, self._pairs = array("I", (0,)), array("I", (0,))
        """By position: the position after the previous occurrence of the token or pair that ends there; 0: none."""

    def extend(self, token_ids: Sequence[int]) -> None:
        """Index the next tokens, except the last, which is the one to search for.

        `token_ids` must extend the tokens of the previous call.
        """
        start = len(self._pairs)
        for end in range(start, min(len(token_ids), start + TOKENS_PER_CALL)):
            token = token_ids[end - 1]
            pair = token_ids[end - 2] if end > 1 else -1, token  # -1: there is no token before the first
            self._pairs.append(self._occurrence(pair))
            self._singles.append(self._occurrence(token))
            self._last[pair] = self._last[token] = end
            if end % MEMORY_TOKENS == 0:
                self._last, self._old = {}, self._last

    def matches(self, token_ids: Sequence[int], k: int) -> list[Match]:
        """Find earlier occurrences of the last tokens, each with its `k` following tokens, longest match first.

        `token_ids` must extend the tokens of the previous call. A continuation that reaches the end repeats.
        """
        self.extend(token_ids)
        last = token_ids[-1]
        single = self._occurrence(last)
        if not single:  # the usual case, in every round of every sequence
            return []
        before = token_ids[-2] if len(token_ids) > 1 else -1
        ends = _linked(self._pairs, self._occurrence((before, last)), MAX_PAIRS)
        pairs = [(match_length(token_ids, end, token_ids, 2), end) for end in ends]
        pairs.sort(key=itemgetter(0), reverse=True)
        ends = _linked(self._singles, single, MAX_SINGLES)
        singles = [(1, end) for end in ends if end < 2 or token_ids[end - 2] != before]
        return [(length, _following(token_ids, end, k)) for length, end in pairs + singles]

    def _occurrence(self, run: int | tuple[int, int]) -> int:
        return self._last.get(run) or self._old.get(run, 0)


def _linked(links: Sequence[int], end: int, limit: int) -> list[int]:
    ends = list[int]()
    while end and len(ends) < limit:
        ends.append(end)
        end = links[end]
    return ends


def _following(token_ids: Sequence[int], end: int, k: int) -> Sequence[int]:
    following = token_ids[end : end + k]
    return following if len(following) == k else list(islice(cycle(following), k))
