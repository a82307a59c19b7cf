"""Remove whitespace between the parts of an answer."""

from collections.abc import Iterable, Iterator

from specpool.openai.deltas import CallArguments, CallStart, Content, Delta, Reasoning
from specpool.openai.text_reader import WHITESPACE


class Trimmer:
    """Removes newlines around reasoning and whitespace around calls. An answer without either stays as it is."""

    def __init__(self, may_call: bool) -> None:
        """`may_call`: whether calls may follow the content, whose trailing whitespace is then held back."""
        self._content_end = WHITESPACE if may_call else ""
        self._part: type[Delta] | None = None
        self._leading = ""
        """Characters to remove from the beginning of the current part. Empty once it has text."""
        self._held: list[str] = []
        """Whitespace at the end of the last text. It is kept only if more text follows."""
        self._has_content = False

    def trim(self, deltas: Iterable[Delta]) -> Iterator[Delta]:
        """Yield deltas without the whitespace between parts."""
        for delta in deltas:
            if isinstance(delta, CallStart | CallArguments):
                self._begin(CallStart)
                yield delta
            else:
                self._begin(type(delta))
                if text := self._trimmed(delta.text):
                    yield Reasoning(text) if self._part is Reasoning else Content(text)

    def finish(self) -> Iterator[Delta]:
        """Yield the whitespace at the end of the answer."""
        if (text := "".join(self._held)) and not self._leading:
            yield Reasoning(text) if self._part is Reasoning else Content(text)

    def _begin(self, part: type[Delta]) -> None:
        if part is self._part:
            return
        if self._part is Reasoning or not self._has_content:
            self._held.clear()
        if CallStart in (part, self._part):
            self._leading = WHITESPACE
        elif self._part or part is Reasoning:
            self._leading = "\n"
        self._part = part

    def _trimmed(self, text: str) -> str:
        text = text.lstrip(self._leading)
        if not text:
            return ""
        self._leading = ""
        kept = text.rstrip("\n" if self._part is Reasoning else self._content_end)
        trailing = text[len(kept) :]
        if not kept:
            self._held.append(trailing)
            return ""
        kept, self._held = "".join([*self._held, kept]), [trailing]
        self._has_content |= self._part is Content
        return kept
