"""The target's tokenizer, built from files that the target worker sends. Needs neither torch nor a model hub."""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from tokenizers import Tokenizer

from coordinator.prompts.detokenizer import Detokenizer
from coordinator.prompts.rust_panics import panics_as_errors
from coordinator.prompts.templates import Chat, ChatTemplate, ChatTemplateError
from specpool.protocol.tokenizer import TokenizerFiles

# Bytes per token of ordinary text. A text that only fits with longer tokens is first counted in pieces: tokenizing all
# of it at once could take a gigabyte.
BYTES_PER_TOKEN = 4
PIECE_CHARACTERS = 16_384
# Tokens that a cut between two pieces may add.
TOKENS_PER_CUT = 64


class TokenizerError(ValueError):
    """The files do not make a tokenizer that fits the model."""


class EncodingError(ValueError):
    """The prompt cannot be tokenized, or has too many tokens."""


@dataclass(frozen=True)
class WorkLimits:
    """Limits on the work for one prompt."""

    tokens: float = math.inf
    """Maximum tokens. Much longer prompts are rejected before all of their tokens are known."""
    characters: float = math.inf
    """Maximum output of the chat template."""
    check: Callable[[], None] = lambda: None
    """Runs periodically and may raise to end the work."""


UNLIMITED = WorkLimits()


class TargetTokenizer:
    """Encodes prompts and decodes generated tokens."""

    def __init__(self, files: TokenizerFiles, vocab_size: int | None = None) -> None:
        """Raise TokenizerError if the files are broken, or if the vocabulary exceeds the model's `vocab_size`.

        Added tokens may exceed it: only prompts with such a token are rejected.
        """
        self.files = files
        self._tokenizer = _load(files.tokenizer_json)
        vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
        without_added = self._tokenizer.get_vocab(with_added_tokens=False)
        _check_ids(without_added or vocabulary, files.eos_token_ids, vocab_size)
        self.longest_token_bytes = max(len(token.encode(errors="replace")) for token in vocabulary)
        """Upper bound on the bytes of text of one token."""
        added = self._tokenizer.get_added_tokens_decoder()
        self._special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self._template = _template(files.chat_template, files)
        self._tool_template = _template(files.tool_chat_template, files) or self._template

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        return self.files.eos_token_ids

    @property
    def has_chat_template(self) -> bool:
        return self._template is not None

    def encode_text(self, text: str, limits: WorkLimits = UNLIMITED) -> list[int]:
        """Tokenize text, with the model's special tokens around it. Raises EncodingError."""
        return self._encode(text, limits, add_special_tokens=True)

    def chat_template(self, with_tools: bool) -> ChatTemplate:
        """The template of a chat with or without tools. Raises ChatTemplateError if there is none."""
        template = self._tool_template if with_tools else self._template
        if template is None:
            raise ChatTemplateError("the target model has no chat template; send text or tokenized input")
        return template

    def encode_chat(self, chat: Chat, limits: WorkLimits = UNLIMITED) -> list[int]:
        """Tokenize a chat, up to the assistant's turn. Raises ChatTemplateError, EncodingError."""
        rendered = self.chat_template(bool(chat.tools)).render(chat, limits.characters, limits.check)
        # The template has written the special tokens itself.
        return self._encode(rendered, limits, add_special_tokens=False)

    def detokenizer(self) -> Detokenizer:
        return Detokenizer(self._tokenizer, self._special_ids)

    def _encode(self, text: str, limits: WorkLimits, add_special_tokens: bool) -> list[int]:
        try:
            if len(text.encode()) > BYTES_PER_TOKEN * limits.tokens:
                self._check_length(text, limits)
            ids: list[int] = self._tokenize(text, add_special_tokens).ids
        except EncodingError:
            raise
        except Exception as error:  # the library has no narrower class
            raise EncodingError(f"the tokenizer rejects this prompt: {error}") from None
        return ids

    def _check_length(self, text: str, limits: WorkLimits) -> None:
        """Count tokens piece by piece. Raises EncodingError as soon as there are too many."""
        counted = TOKENS_PER_CUT
        for start in range(0, len(text), PIECE_CHARACTERS):
            limits.check()
            piece = self._tokenize(text[start : start + PIECE_CHARACTERS], add_special_tokens=False)
            counted += len(piece) - TOKENS_PER_CUT
            if counted > limits.tokens:
                raise EncodingError(f"the prompt has more than {limits.tokens:g} tokens")

    def _tokenize(self, text: str, add_special_tokens: bool) -> Any:
        # A batch of one: `encode` would hold the GIL.
        with panics_as_errors():
            return self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0]


def _load(tokenizer_json: bytes) -> Tokenizer:
    try:
        with panics_as_errors():
            tokenizer = Tokenizer.from_str(tokenizer_json.decode())
    except Exception as error:  # the library has no narrower class
        raise TokenizerError(f"tokenizer.json is broken: {error}") from None
    # Files may carry settings of a training run.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _template(source: str, files: TokenizerFiles) -> ChatTemplate | None:
    try:
        return ChatTemplate(source, files.special_tokens) if source else None
    except ValueError as error:
        raise TokenizerError(str(error)) from None


def _check_ids(vocabulary: Mapping[str, int], eos_token_ids: Iterable[int], vocab_size: int | None) -> None:
    if not vocabulary:
        raise TokenizerError("the tokenizer has no vocabulary")
    largest = max(*vocabulary.values(), *eos_token_ids, -1)
    if vocab_size is not None and largest >= vocab_size:
        raise TokenizerError(f"the tokenizer's token id {largest} exceeds the model's vocabulary size {vocab_size}")
