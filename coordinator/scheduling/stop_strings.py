"""Stop-string matching, character by character, with a Knuth-Morris-Pratt automaton. Pure.

A character takes amortized constant time, whatever the stop string and the text.
"""

from collections.abc import Sequence
from functools import lru_cache

# Failure tables to cache. Samples of a request, and often all requests of a client, share their stop strings.
MAX_TABLES = 1024


class StopString:
    """A stop string, and how much of it the text so far ends with."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.matched = 0
        """Length of the longest proper prefix of the stop string that the text ends with."""
        self._table = failure_table(text)

    def feed(self, piece: str) -> int:
        """Takes more text. Returns where in `piece` the first occurrence ends; 0 without one."""
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
