"""Removal of the whitespace between the parts of an answer."""

from collections.abc import Iterable, Iterator

from specpool.openai.deltas import CallArguments, CallStart, Content, Delta, Reasoning

WHITESPACE = " \t\r\n"


class Trimmer:
    """Removes newlines around reasoning and whitespace around calls. An answer without either stays as it is."""

    def __init__(self) -> None:
        self._part: type[Delta] | None = None
        self._leading = ""
        """Characters to remove from the beginning of the current part."""
        self._held = ""
        """Whitespace at the end of the current part. It is kept only if the part continues or the answer ends."""

    def trim(self, deltas: Iterable[Delta]) -> Iterator[Delta]:
        """Yield deltas without the whitespace between parts."""
        for delta in deltas:
            if isinstance(delta, CallStart | CallArguments):
                self._part, self._held = CallStart, ""
                yield delta
            else:
                self._begin(type(delta))
                if text := self._trimmed(delta.text):
                    yield type(delta)(text)

    def finish(self) -> Iterator[Delta]:
        """Yield the whitespace at the end of the answer."""
        if self._held:
            yield Reasoning(self._held) if self._part is Reasoning else Content(self._held)

    def _begin(self, part: type[Content | Reasoning]) -> None:
        if self._part is not part:
            if self._part is CallStart:
                self._leading = WHITESPACE
            else:
                self._leading = "" if self._part is None and part is Content else "\n"
            self._part, self._held = part, ""

    def _trimmed(self, text: str) -> str:
        text = self._held + text.lstrip(self._leading) if self._leading else self._held + text
        if text:
            self._leading = ""
        kept = text.rstrip("\n" if self._part is Reasoning else WHITESPACE)
        self._held = text[len(kept) :]
        return kept
