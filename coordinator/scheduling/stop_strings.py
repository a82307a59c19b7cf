"""Stop strings, looked for character by character: the Knuth-Morris-Pratt automaton. Pure.

A character costs constant time on average, whatever the stop string and the text are.
"""

from collections.abc import Sequence
from functools import lru_cache

# Stop strings whose tables are kept: the samples of a request, and often all requests of a client, have the same ones.
TABLES_KEPT = 1024


class StopString:
    """One stop string and how much of it the text so far ends with."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.begun = 0
        """Number of last characters of the text that are the first ones of the stop string: as many as possible, but
        never all."""
        self._borders = borders(text)

    def feed(self, piece: str) -> int:
        """Takes the next characters of the text; returns where in them the first occurrence ends, 0 if none does.

        The occurrence begins `len(self.text)` characters before that. Occurrences may overlap.
        """
        text, table, begun, ends = self.text, self._borders, self.begun, 0
        if not begun and text[0] not in piece:
            return 0
        for at, character in enumerate(piece, start=1):
            while begun and text[begun] != character:
                begun = table[begun]
            begun += text[begun] == character
            if begun == len(text):
                ends = ends or at
                begun = table[begun]
        self.begun = begun
        return ends


@lru_cache(maxsize=TABLES_KEPT)
def borders(text: str) -> Sequence[int]:
    """For each length of a beginning of the text: the length of the longest shorter one that it also ends with."""
    table = [0, 0]
    for character in text[1:]:
        border = table[-1]
        while border and text[border] != character:
            border = table[border]
        table.append(border + (text[border] == character))
    return tuple(table)
