"""Incremental detokenization in constant time per token, even for invalid bytes."""

import logging
from collections.abc import Iterable, Set

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from coordinator.prompts.rust_panics import is_panic, panics_as_errors

log = logging.getLogger(__name__)

REPLACEMENT = "\ufffd"

# Maximum number of tokens that wait for the rest of a character. No character has more than four bytes.
MAX_PENDING = 16
# Tokens that still wait beyond this maximum: the last ones may begin a character.
KEPT_PENDING = 4


class Detokenizer:
    """Converts tokens to text as they arrive. Incomplete characters wait for the next token."""

    def __init__(self, tokenizer: Tokenizer, silent: Set[int] = frozenset()) -> None:
        """`silent`: tokens without text."""
        self._tokenizer, self._silent = tokenizer, silent
        self._stream = DecodeStream(skip_special_tokens=True)
        self._context: list[int] = []
        """Tokens of the last piece. Text, such as a space between words, can depend on the token before it."""
        self._pending: list[int] = []
        self._has_warned = False

    def feed(self, token_ids: Iterable[int]) -> str:
        """Return the text that these tokens complete. Undecodable tokens become replacement characters."""
        pieces = []
        for token_id in token_ids:
            if token_id not in self._silent:
                pieces.append(self._step(token_id))
                if len(self._pending) > MAX_PENDING:
                    pieces.append(self._flush_invalid())
        return "".join(pieces)

    def flush(self) -> str:
        """Return the remaining text. Incomplete characters become replacement characters."""
        text = self._decode(self._pending) if self._pending else ""
        self._pending = []
        return text

    def _step(self, token_id: int) -> str:
        self._pending.append(token_id)
        try:
            piece: str | None = self._stream.step(self._tokenizer, token_id)
        except BaseException as error:
            if not (isinstance(error, Exception) or is_panic(error)):
                raise
            # With byte fallback, an invalid byte changes the decoding of earlier bytes, whose text is already out.
            self._stream = DecodeStream(ids=self._pending, skip_special_tokens=True)
            piece = self._decode(self._pending)
        if piece is None:
            return ""
        self._context, self._pending = self._pending, []
        return piece

    def _flush_invalid(self) -> str:
        """Return the text of all pending tokens but the last ones, since they complete no character."""
        count = self._num_settled()
        settled, rest = self._pending[:count], self._pending[count:]
        self._stream, self._pending = DecodeStream(ids=self._context, skip_special_tokens=True), []
        return "".join([self._decode(settled), *map(self._step, rest)])

    def _num_settled(self) -> int:
        """Return the number of pending tokens whose text is final.

        The cut is between two characters, where both parts decode to the same text as the whole.
        """
        text, maximum = self._decode(self._pending), len(self._pending) - KEPT_PENDING
        for count in range(maximum, maximum - KEPT_PENDING, -1):
            if self._decode(self._pending[:count]) + self._decode(self._pending[count:]) == text:
                return count
        return maximum

    def _decode(self, token_ids: list[int]) -> str:
        try:
            with panics_as_errors():
                text: str = self._tokenizer.decode(token_ids, skip_special_tokens=True)
        except Exception as error:  # the library has no narrower class
            if not self._has_warned:  # type only: the message may quote the tokens
                log.warning("the tokenizer cannot decode some tokens: %s", type(error).__name__)
            self._has_warned = True
            return REPLACEMENT * len(token_ids)
        return text
