"""The text of one generation as its tokens come: never half a character, never part of a stop string. Pure."""

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from coordinator.scheduling.stop_strings import StopString


class Decoder(Protocol):
    """Turns tokens into text; `coordinator.prompts.detokenizer.Detokenizer` is one."""

    def feed(self, token_ids: Iterable[int]) -> str:
        """The text that these tokens complete."""

    def flush(self) -> str:
        """The remaining text, when no token will follow."""


ShownText = Callable[[], str]
"""Makes the text of some tokens when it is asked for, once, after that of all tokens before them."""


class TextStream:
    """Text as it can be shown: what may be the beginning of a stop string is held back until that is known."""

    def __init__(self, decoder: Decoder, stop: Sequence[str] = ()) -> None:
        self.matched: str | None = None
        """The stop string that ended the text. Among several it is the one that begins first, and among these the
        longest."""
        self._decoder, self._stop = decoder, [StopString(text) for text in stop]
        self._held = ""

    @property
    def may_end(self) -> bool:
        """Whether the text can end the generation."""
        return bool(self._stop)

    def feed(self, token_id: int, may_stop: bool = True) -> str:
        """The text that can be shown once this token has come.

        Without `may_stop`, a stop string that this token completes is ordinary text.
        """
        known, piece = len(self._held), self._decoder.feed([token_id])
        self._held += piece
        ends = [
            (known + end - len(stop.text), -len(stop.text), stop.text)
            for stop in self._stop
            if (end := stop.feed(piece))
        ]
        if ends and may_stop:
            at, _, self.matched = min(ends)
            shown, self._held = self._held[:at], ""
            return shown
        return self._show(len(self._held) - max((stop.begun for stop in self._stop), default=0))

    def flush(self) -> str:
        """The text held back, when no token will follow."""
        rest, self._held = self._held + self._decoder.flush(), ""
        return rest

    def _show(self, count: int) -> str:
        shown, self._held = self._held[:count], self._held[count:]
        return shown
