"""Stop-string matching, character by character, with a Knuth-Morris-Pratt automaton. Pure.

Matching takes amortized constant time per character.
"""

from collections.abc import Sequence
from functools import lru_cache

# Failure tables to cache. Samples of a request, and often all requests of a client, share their stop strings.
MAX_TABLES = 1024


class StopString:
    """A stop string, and the length of its prefix at the end of the text so far."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.matched = 0
        """Length of the longest proper prefix of the stop string that the text ends with."""
        self._table = failure_table(text)

    def feed(self, piece: str) -> int:
        """Feed more text. Return the end of the first occurrence in `piece`, or 0 without one."""
        text, table, matched, end = self.text, self._table, self.matched, 0
        if not matched and text[0] not in piece:
            return 0
        for at, character in enumerate(piece, start=1):
            while matched and text[matched] != character:
                matched = table[matched]
            matched += text[matched] == character
            if matched == len(text):
                end = end or at
                matched = table[matched]
        self.matched = matched
        return end


@lru_cache(maxsize=MAX_TABLES)
def failure_table(text: str) -> Sequence[int]:
    """For each prefix length: the length of the longest shorter prefix that is also a suffix of that prefix."""
    table = [0, 0]
    for character in text[1:]:
        border = table[-1]
        while border and text[border] != character:
            border = table[border]
        table.append(border + (text[border] == character))
    return tuple(table)
