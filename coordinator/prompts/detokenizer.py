"""Tokens to text as they come, in constant time for each token, whatever the tokens are."""

import logging
from collections.abc import Iterable, Set

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from coordinator.prompts.rust_panics import is_panic, panics_are_errors

log = logging.getLogger(__name__)

REPLACEMENT = "\ufffd"

# Tokens that wait for the rest of a character; no character has more than four bytes.
MOST_PENDING = 16
# Tokens that go on waiting once more than that wait: the last ones may still begin a character.
KEPT_PENDING = 4


class Detokenizer:
    """Turns tokens into text as they come. A character whose bytes are still incomplete waits for the next token."""

    def __init__(self, tokenizer: Tokenizer, silent: Set[int] = frozenset()) -> None:
        """`silent`: tokens that make no text."""
        self._tokenizer, self._silent = tokenizer, silent
        self._stream = DecodeStream(skip_special_tokens=True)
        self._context: list[int] = []
        """The tokens of the last piece. Text can depend on the token before it: a space between words does."""
        self._pending: list[int] = []
        self._failed = False

    def feed(self, token_ids: Iterable[int]) -> str:
        """The text that these tokens complete; the replacement character for tokens that cannot be decoded."""
        pieces = []
        for token_id in token_ids:
            if token_id not in self._silent:
                pieces.append(self._step(token_id))
                if len(self._pending) > MOST_PENDING:
                    pieces.append(self._give_up())
        return "".join(pieces)

    def flush(self) -> str:
        """The remaining text, when no token will follow: replacement characters for incomplete ones."""
        rest = self._decode(self._pending) if self._pending else ""
        self._pending = []
        return rest

    def _step(self, token_id: int) -> str:
        self._pending.append(token_id)
        try:
            piece: str | None = self._stream.step(self._tokenizer, token_id)
        except BaseException as error:
            if not (isinstance(error, Exception) or is_panic(error)):
                raise
            # With byte fallback, bytes that make no character spoil those before them, whose text is out already.
            self._stream = DecodeStream(ids=self._pending, skip_special_tokens=True)
            piece = self._decode(self._pending)
        if piece is None:
            return ""
        self._context, self._pending = self._pending, []
        return piece

    def _give_up(self) -> str:
        """The text of all pending tokens but the last ones: they complete no character."""
        count = self._finished()
        given_up, rest = self._pending[:count], self._pending[count:]
        self._stream, self._pending = DecodeStream(ids=self._context, skip_special_tokens=True), []
        return "".join([self._decode(given_up), *map(self._step, rest)])

    def _finished(self) -> int:
        """The number of pending tokens whose text will not change any more: all but the last ones, cut between two
        characters, where the parts decode to the same text as the whole."""
        whole, most = self._decode(self._pending), len(self._pending) - KEPT_PENDING
        for count in range(most, most - KEPT_PENDING, -1):
            if self._decode(self._pending[:count]) + self._decode(self._pending[count:]) == whole:
                return count
        return most

    def _decode(self, token_ids: list[int]) -> str:
        try:
            with panics_are_errors():
                text: str = self._tokenizer.decode(token_ids, skip_special_tokens=True)
        except Exception as error:  # the library has no narrower one; the tokens are right, whatever their text is
            if not self._failed:  # one warning is enough
                log.warning("the tokenizer cannot decode some tokens: %s", type(error).__name__)  # it may quote them
            self._failed = True
            return REPLACEMENT * len(token_ids)
        return text
