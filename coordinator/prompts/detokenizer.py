"""Incremental detokenization in constant time per token, with decoders rebuilt from an untrusted description.

The coordinator decodes every generated token, so it accepts only decoders that cannot make a text much longer, and no
regular expressions, which can take any time.
"""

import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from tokenizers import decoders

log = logging.getLogger(__name__)

MAX_DEPTH = 8
MAX_DECODERS = 32
# Maximum bytes of text per token byte.
MAX_GROWTH = 8.0
# A byte may become a replacement character of three bytes.
LOSSY_GROWTH = 3.0

Decode = Callable[[list[str]], str]
"""Returns the text of a list of tokens."""


REPLACEMENT = "\ufffd"

# Maximum number of tokens that wait for the rest of a character. No character has more than four bytes.
MAX_PENDING = 16
# Tokens that still wait beyond this maximum: the last ones may begin a character.
KEPT_PENDING = 4
# Trailing prompt tokens to read as context: enough for a whole character, part of the next, and some text before.
PROMPT_CONTEXT = 12
CONTEXT_TOKEN = "a"
"""A token that almost every vocabulary has."""


def read_decoder(description: Any) -> Decode:
    """Rebuild a decoder from its JSON value. Raises ValueError for unsupported decoders."""
    if description is None:
        return " ".join
    steps = _steps(description, MAX_DEPTH)
    if len(steps) > MAX_DECODERS:
        raise ValueError(f"its decoder has more than {MAX_DECODERS} steps")
    made = [_make(step) for step in steps]
    if math.prod(growth for _, growth in made) > MAX_GROWTH:
        raise ValueError(f"its decoder can make text more than {MAX_GROWTH:g} times longer")
    decode: Decode = decoders.Sequence([decoder for decoder, _ in made]).decode
    return decode


def _steps(description: Any, levels: int) -> list[dict[str, Any]]:
    """Return the decoders of nested sequences in order."""
    if not isinstance(description, dict) or not levels:
        raise ValueError("its decoder is malformed")
    if description.get("type") != "Sequence":
        return [description]
    members = description.get("decoders")
    if not isinstance(members, list):
        raise ValueError("its decoder is malformed")
    return [step for member in members for step in _steps(member, levels - 1)]


def _make(step: dict[str, Any]) -> tuple[Any, float]:
    """Return a decoder and its growth."""
    kind = step.get("type")
    options = {name: value for name, value in step.items() if name != "type"}
    try:
        if kind == "Replace":
            pattern, content = options["pattern"]["String"], options["content"]
            return decoders.Replace(pattern, content), max(1.0, len(content.encode()) / _size(pattern))
        if kind == "Strip":
            return decoders.Strip(options["content"], options["start"], options["stop"]), 1.0
        if kind == "ByteLevel":
            return decoders.ByteLevel(), LOSSY_GROWTH
        if kind in ("ByteFallback", "Fuse"):
            return getattr(decoders, kind)(), 1.0
        if kind == "Metaspace":
            return decoders.Metaspace(**options), 1.0
        if kind == "WordPiece":
            return decoders.WordPiece(**options), 2.0  # a space before a token
        if kind == "BPEDecoder":
            return decoders.BPEDecoder(**options), max(1.0, 1 / _size(options["suffix"]))
        if kind == "CTC":
            return decoders.CTC(**options), max(1.0, 1 / _size(options["word_delimiter_token"]))
    except (KeyError, TypeError, ValueError, OverflowError, AttributeError):
        raise ValueError(f"its decoder {kind} is not supported with these options") from None
    raise ValueError(f"its decoder {str(kind)[:64]!r} is not supported")


def _size(text: Any) -> int:
    """Return the bytes of a text. An empty pattern matches everywhere."""
    if not isinstance(text, str) or not text:
        raise ValueError("not a text")
    return len(text.encode())


@dataclass(frozen=True)
class Vocabulary:
    """The tokens and their decoder."""

    tokens: Mapping[int, str]
    special_ids: frozenset[int]
    decode: Decode


class Detokenizer:
    """Converts tokens to text as they arrive. Incomplete characters wait for the next token.

    As in vLLM and TGI, the output is the text that the tokens add to the decoded prompt. A decoder that strips the
    first space strips the prompt's, not the answer's. A character that begins in the prompt belongs to the output.
    """

    def __init__(
        self, vocabulary: Vocabulary, prompt_ids: Sequence[int] = (), skip_special_tokens: bool = True
    ) -> None:
        self._tokens, self._decode_tokens = vocabulary.tokens, vocabulary.decode
        self._skipped = vocabulary.special_ids if skip_special_tokens else frozenset[int]()
        self._context: list[str] = []
        """Tokens of the last piece. Text, such as a space between words, can depend on the token before it."""
        self._context_text = ""
        self._pending: list[str] = []
        self._prompt_rest = ""
        """Text of the prompt's trailing tokens, which may begin a character and so are not context yet."""
        self._has_warned = False
        self._read_prompt(prompt_ids)

    def feed(self, token_ids: Iterable[int]) -> str:
        """Return the text that these tokens complete. Undecodable tokens become replacement characters."""
        pieces = []
        for token_id in token_ids:
            if (token := self._token(token_id)) is not None:
                pieces.append(self._step(token))
                if len(self._pending) > MAX_PENDING:
                    pieces.append(self._flush_invalid())
        return self._without_prompt("".join(pieces))

    def flush(self) -> str:
        """Return the remaining text. Incomplete characters become replacement characters."""
        text = self._pending_text() if self._pending else ""
        self._pending = []
        return self._without_prompt(text)

    def _token(self, token_id: int) -> str | None:
        return None if token_id in self._skipped else self._tokens.get(token_id)

    def _read_prompt(self, prompt_ids: Sequence[int]) -> None:
        """Read the prompt's last tokens as context. Skip leading tokens that are the tail of a split character."""
        with_text = (token for i in reversed(prompt_ids) if (token := self._token(i)) is not None)
        tokens = list(islice(with_text, PROMPT_CONTEXT))[::-1]
        for start in range(KEPT_PENDING if len(tokens) == PROMPT_CONTEXT else 1):
            self._context, self._context_text, self._pending = [], "", []
            text = "".join(map(self._step, tokens[start:]))
            if text and REPLACEMENT not in text:
                break
        self._prompt_rest = self._pending_text() if self._pending else ""

    def _without_prompt(self, text: str) -> str:
        """Strip the prompt's incomplete trailing text from the first output, unless the new tokens completed it."""
        if text and self._prompt_rest:
            text, self._prompt_rest = text.removeprefix(self._prompt_rest), ""
        return text

    def _step(self, token: str) -> str:
        self._pending.append(token)
        text = self._try_decode([*self._context, *self._pending])
        if text is not None and (len(text) <= len(self._context_text) or text.endswith(REPLACEMENT)):
            return ""
        piece = self._added(text)
        self._context, self._context_text = self._pending, self._decode(self._pending)
        self._pending = []
        return piece

    def _pending_text(self) -> str:
        return self._added(self._try_decode([*self._context, *self._pending]))

    def _added(self, text: str | None) -> str:
        """Return the text that the pending tokens add to the context. `text`: the decoded text of both."""
        if text is not None and text.startswith(self._context_text):
            return text[len(self._context_text) :]
        # With byte fallback, an invalid byte changes the decoding of earlier bytes, whose text is already out.
        return self._decode(self._pending)

    def _flush_invalid(self) -> str:
        """Return the text of all pending tokens but the last ones, since they complete no character."""
        count = self._num_settled()
        settled, rest = self._pending[:count], self._pending[count:]
        self._pending = []
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

    def _decode(self, tokens: list[str]) -> str:
        text = self._try_decode(tokens)
        return REPLACEMENT * len(tokens) if text is None else text

    def _try_decode(self, tokens: list[str]) -> str | None:
        """Return the text, or None if the library fails."""
        try:
            return self._decode_tokens(tokens)
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # the library has no narrower class, and its panics are no exceptions
            if not self._has_warned:  # type only: the message may quote the tokens
                log.warning("the tokenizer cannot decode some tokens: %s", type(error).__name__)
            self._has_warned = True
            return None


class TokenTexts(dict[int, str]):
    """Text of each token id, special tokens included, as it appears in the middle of a text. Computed on demand."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        super().__init__()
        self._vocabulary = vocabulary
        # Some decoders strip the space before the first token.
        self._context = [token_id for token_id, token in vocabulary.tokens.items() if token == CONTEXT_TOKEN][:1]

    def __missing__(self, token_id: int) -> str:
        detokenizer = Detokenizer(self._vocabulary, self._context, skip_special_tokens=False)
        text = self[token_id] = detokenizer.feed((token_id,)) + detokenizer.flush()
        return text
