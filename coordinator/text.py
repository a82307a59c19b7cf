"""The text of one generation as its tokens come: never half a character, never part of a stop string. Pure."""

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol


class Decoder(Protocol):
    """Turns tokens into text; `coordinator.tokenizer.Detokenizer` is one."""

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
        """The stop string that ended the text. Among several it is the one that begins first."""
        self._decoder, self._stop = decoder, stop
        self._held = ""

    @property
    def may_end(self) -> bool:
        """Whether the text can end the generation."""
        return bool(self._stop)

    def feed(self, token_id: int, may_stop: bool = True) -> str:
        """The text that can be shown once this token has come.

        Without `may_stop`, a stop string that this token completes is ordinary text.
        """
        known = len(self._held)
        self._held += self._decoder.feed([token_id])
        found = [(at, -len(stop), stop) for stop in self._stop if (at := self._find(stop, known)) >= 0]
        if found and may_stop:
            at, _, self.matched = min(found)
            shown, self._held = self._held[:at], ""
            return shown
        return self._show(len(self._held) - max((self._begun(stop) for stop in self._stop), default=0))

    def flush(self) -> str:
        """The text held back, when no token will follow."""
        rest, self._held = self._held + self._decoder.flush(), ""
        return rest

    def _find(self, stop: str, known: int) -> int:
        """Where a stop string begins that was not complete in the first `known` characters held; -1: nowhere."""
        return self._held.find(stop, max(0, known - len(stop) + 1))

    def _show(self, count: int) -> str:
        shown, self._held = self._held[:count], self._held[count:]
        return shown

    def _begun(self, stop: str) -> int:
        """The number of last characters that are the first ones of a stop string."""
        most = min(len(stop) - 1, len(self._held))
        return next((n for n in range(most, 0, -1) if self._held.endswith(stop[:n])), 0)
