"""Incremental parsing of generated text.

Parsers are generators that read from a `TextReader`. They yield None when they need more text and continue once it has
arrived, so their results do not depend on chunk boundaries.
"""

import re
from collections.abc import Callable, Generator
from typing import TypeVar

T = TypeVar("T")
Result = TypeVar("Result")
Steps = Generator[T | None, None, Result]
"""A parser, or a part of one: yields items, or None when it needs more text. Returns a result."""

WHITESPACE = " \t\r\n"


class TextReader:
    """Text that arrives in chunks, and the read position. Takes linear time."""

    def __init__(self) -> None:
        self.has_ended = False
        self._text = ""
        self._position = 0
        self._marked: list[str] | None = None

    def feed(self, text: str) -> None:
        """Append text."""
        self._text, self._position = self._text[self._position :] + text, 0

    def end(self) -> None:
        """Mark the end of the text."""
        self.has_ended = True

    @property
    def is_at_end(self) -> bool:
        """Whether the whole text has been read."""
        return self.has_ended and self._position == len(self._text)

    def mark(self) -> None:
        """Start recording the text that is read."""
        self._marked = []

    def since_mark(self) -> str:
        """Return the text read since `mark`, and stop recording."""
        text, self._marked = "".join(self._marked or ()), None
        return text

    def until(self, wrap: Callable[[str], T], *tags: str) -> Steps[T, str | None]:
        """Yield the text before the first of `tags` as it arrives, and skip the tag. Returns it, or None at the end."""
        while True:
            text, tag = self._next_text(tags)
            if text:
                yield wrap(text)
            if tag or self.has_ended:
                return tag
            yield None

    def collect_until(self, *tags: str) -> Steps[T, tuple[str, str | None]]:
        """Skip the text up to the first of `tags`, and the tag. Returns both; the tag is None at the end."""
        return (yield from collected(self.until(str, *tags)))

    def scan(self, wrap: Callable[[str], T], find_end: Callable[[str, int], int | None]) -> Steps[T, bool]:
        """Yield text as it arrives until `find_end` returns an end. Returns False if the text ends first.

        `find_end` gets a text and a position in it. It is called again with the text that follows.
        """
        while True:
            end = find_end(self._text, self._position)
            if text := self._take(len(self._text) if end is None else end):
                yield wrap(text)
            if end is not None or self.has_ended:
                return end is not None
            yield None

    def peek(self) -> Steps[T, str]:
        """Return the next character, or an empty text at the end."""
        while self._position == len(self._text) and not self.has_ended:
            yield None
        return self._text[self._position : self._position + 1]

    def skip(self, *tags: str) -> Steps[T, str | None]:
        """Skip one of `tags` if the text continues with it. Returns the tag, or None."""
        while not self.has_ended and any(self._may_begin(tag) for tag in tags):
            yield None
        tag = next((tag for tag in tags if self._text.startswith(tag, self._position)), None)
        self._take(self._position + len(tag or ""))
        return tag

    def skip_all(self, characters: str = WHITESPACE) -> Steps[T, str]:
        """Skip all following `characters`, and return them."""
        skipped: list[str] = []
        pattern = re.compile(f"[{re.escape(characters)}]*")
        while True:
            if match := pattern.match(self._text, self._position):
                skipped.append(self._take(match.end()))
            if self._position < len(self._text) or self.has_ended:
                return "".join(skipped)
            yield None

    def _may_begin(self, tag: str) -> bool:
        length = len(self._text) - self._position
        return length < len(tag) and tag.startswith(self._text[self._position :])

    def _next_text(self, tags: tuple[str, ...]) -> tuple[str, str | None]:
        """Read up to the first tag, or up to text that may begin one. Returns the text and the tag, if found."""
        found = re.compile("|".join(map(re.escape, tags))).search(self._text, self._position) if tags else None
        end = len(self._text)
        if not self.has_ended:
            end = min((_certain_end(self._text, self._position, tag) for tag in tags), default=end)
        if found and found.start() <= end:
            return self._take(found.start()), self._take(found.end())
        return self._take(end), None

    def _take(self, end: int) -> str:
        text, self._position = self._text[self._position : end], end
        if self._marked is not None:
            self._marked.append(text)
        return text


def collected(steps: Steps[str, Result]) -> Steps[T, tuple[str, Result]]:
    """Return the joined text that a parser yields, and its result."""
    parts: list[str] = []
    while True:
        try:
            part = next(steps)
        except StopIteration as stop:
            return "".join(parts), stop.value
        if part is None:
            yield None
        else:
            parts.append(part)


def _certain_end(text: str, position: int, tag: str) -> int:
    """Return the end of `text` without the longest part after `position` that may begin `tag`."""
    longest = min(len(text) - position, len(tag) - 1)
    return len(text) - next((n for n in range(longest, 0, -1) if text.endswith(tag[:n])), 0)
