"""Incremental reading of generated text.

Parsers are generators that read from a `TextReader`. They yield None when they need more text and continue once it has
arrived, so their results do not depend on how the text is divided into chunks.
"""

from collections.abc import Callable, Generator
from typing import TypeVar

T = TypeVar("T")
Result = TypeVar("Result")
Steps = Generator[T | None, None, Result]
"""A parser, or a part of one: yields items, or None when it needs more text. Returns a result."""


class TextReader:
    """Text that arrives in chunks, and the position up to which it has been read."""

    def __init__(self) -> None:
        self._text = ""
        self._has_ended = False

    def feed(self, text: str) -> None:
        """Append text."""
        self._text += text

    def end(self) -> None:
        """Mark the end of the text."""
        self._has_ended = True

    def until(self, wrap: Callable[[str], T], *tags: str) -> Steps[T, str | None]:
        """Yield the text before the first of `tags` as it arrives, and skip the tag. Returns it, or None at the end."""
        while True:
            text, tag = self._next_text(tags)
            if text:
                yield wrap(text)
            if tag or self._has_ended:
                return tag
            yield None

    def collect_until(self, *tags: str) -> Steps[T, tuple[str, str | None]]:
        """Return the text before the first of `tags` and skip the tag. Returns the tag too, or None at the end."""
        parts: list[str] = []
        while True:
            text, tag = self._next_text(tags)
            parts.append(text)
            if tag or self._has_ended:
                return "".join(parts), tag
            yield None

    def skip(self, *tags: str) -> Steps[T, str | None]:
        """Skip one of `tags` if the text continues with it. Returns the tag, or None."""
        while not self._has_ended and any(tag != self._text and tag.startswith(self._text) for tag in tags):
            yield None
        tag = next((tag for tag in tags if self._text.startswith(tag)), None)
        self._text = self._text[len(tag or "") :]
        return tag

    def skip_all(self, characters: str) -> Steps[T, str]:
        """Skip all following `characters`, and return them."""
        skipped = ""
        while True:
            rest = self._text.lstrip(characters)
            skipped += self._text[: len(self._text) - len(rest)]
            self._text = rest
            if rest or self._has_ended:
                return skipped
            yield None

    def unread(self, text: str) -> None:
        """Put text back in front of the unread text."""
        self._text = text + self._text

    def _next_text(self, tags: tuple[str, ...]) -> tuple[str, str | None]:
        """Read up to the first tag, without text that may begin one. Returns the text, and the tag if there is one."""
        found = [(position, tag) for tag in tags if (position := self._text.find(tag)) >= 0]
        if found:
            length, tag = min(found)
        else:
            held = 0 if self._has_ended else max((_overlap(self._text, tag) for tag in tags), default=0)
            length, tag = len(self._text) - held, ""
        text, self._text = self._text[:length], self._text[length + len(tag) :]
        return text, tag or None


def _overlap(text: str, tag: str) -> int:
    """Return the length of the longest end of `text` that may begin `tag`."""
    return next((n for n in range(min(len(text), len(tag) - 1), 0, -1) if tag.startswith(text[-n:])), 0)
