"""Streamed text of one generation: never half a character, never part of a stop string. Pure."""

from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from typing import Protocol

# Failure tables to cache. Samples of a request, and often all requests of a client, share their stop strings.
MAX_TABLES = 1024


class StopString:
    """A stop string, and the length of its prefix at the end of the text so far.

    Matches with a Knuth-Morris-Pratt automaton, in amortized constant time per character.
    """

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


class Decoder(Protocol):
    """Detokenizes incrementally, as `coordinator.prompts.detokenizer.Detokenizer` does."""

    def feed(self, token_ids: Iterable[int]) -> str:
        """Return the text that these tokens complete."""

    def flush(self) -> str:
        """Return the remaining text."""


ShownText = Callable[[], str]
"""Returns the text of a commit. Call each function once, in commit order."""


class TextStream:
    """Holds back text that may be the beginning of a stop string."""

    def __init__(self, decoder: Decoder, stop: Sequence[str] = ()) -> None:
        self.matched: str | None = None
        """The stop string that ended the text. The earliest match wins, then the longest."""
        self._decoder, self._stop = decoder, [StopString(text) for text in stop]
        self._held = ""

    @property
    def may_end(self) -> bool:
        return bool(self._stop)

    def feed(self, token_id: int, may_stop: bool = True) -> str:
        """Return the text to show after this token. Without `may_stop`, completed stop strings are text."""
        held, piece = len(self._held), self._decoder.feed([token_id])
        self._held += piece
        ends = [(stop.text, held + end) for stop in self._stop if (end := stop.feed(piece))]
        matches = [(end - len(text), -len(text), text) for text, end in ends]
        if matches and may_stop:
            begin, _, self.matched = min(matches)
            shown, self._held = self._held[:begin], ""
            return shown
        count = len(self._held) - max((stop.matched for stop in self._stop), default=0)
        shown, self._held = self._held[:count], self._held[count:]
        return shown

    def flush(self) -> str:
        """Return the text held back, at the end of the generation."""
        rest, self._held = self._held + self._decoder.flush(), ""
        return rest
