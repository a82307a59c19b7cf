"""The target's tokenizer, from files that the target worker sends: no torch, no model hub."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tokenizers import Tokenizer

from coordinator.prompts.detokenizer import Detokenizer
from coordinator.prompts.rust_panics import panics_are_errors
from coordinator.prompts.templates import ChatTemplate, ChatTemplateError
from specpool.protocol.tokenizer import TokenizerFiles

# Tokens of ordinary text have about this number of bytes. A text that fits only if its tokens are longer is counted in
# pieces first: all of its tokens at once could take a gigabyte.
BYTES_A_TOKEN = 4
PIECE_CHARACTERS = 16_384
# Tokens that a cut between two pieces may add to those of the whole text.
TOKENS_A_CUT = 64


class TokenizerError(ValueError):
    """The files make no tokenizer that can serve the model."""


class EncodingError(ValueError):
    """The prompt cannot be tokenized, or has too many tokens."""


@dataclass(frozen=True)
class WorkLimits:
    """The most that may be done for one prompt."""

    tokens: float = math.inf
    """Longer prompts are refused, some of them before all of their tokens are known."""
    characters: float = math.inf
    """Characters that a chat template may write."""
    check: Callable[[], None] = lambda: None
    """Called every now and then; what it raises ends the work."""


UNLIMITED = WorkLimits()


class TargetTokenizer:
    """Encodes prompts and decodes what was generated."""

    def __init__(self, files: TokenizerFiles, vocab_size: int | None = None) -> None:
        """TokenizerError if the files are broken, or the vocabulary has ids not below the model's `vocab_size`.

        Ids of tokens that were added to the vocabulary may be beyond it: only a prompt with such a token is refused.
        """
        self.files = files
        self._tokenizer = _read(files.tokenizer_json)
        vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
        own = self._tokenizer.get_vocab(with_added_tokens=False)
        _check_ids(own or vocabulary, files.eos_token_ids, vocab_size)
        self.longest_token_bytes = max(len(token.encode(errors="replace")) for token in vocabulary)
        """An upper bound on the bytes of text that one token can stand for."""
        added = self._tokenizer.get_added_tokens_decoder()
        self._special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self._template: ChatTemplate | None = None
        if files.chat_template:
            try:
                self._template = ChatTemplate(files.chat_template, files.special_tokens)
            except ValueError as error:
                raise TokenizerError(str(error)) from None

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Tokens that end a generation."""
        return self.files.eos_token_ids

    @property
    def has_chat_template(self) -> bool:
        """Whether `encode_chat` can work."""
        return self._template is not None

    def encode_text(self, text: str, limits: WorkLimits = UNLIMITED) -> list[int]:
        """Token ids of a text, with the special tokens that the model puts around one. EncodingError."""
        return self._encode(text, limits, add_special_tokens=True)

    def encode_chat(self, messages: Sequence[tuple[str, str]], limits: WorkLimits = UNLIMITED) -> list[int]:
        """Token ids of a conversation of (role, content), ready for the assistant's turn.

        ChatTemplateError, EncodingError.
        """
        if self._template is None:
            raise ChatTemplateError("the target model has no chat template; send text or tokenized input")
        rendered = self._template.render(messages, limits.characters, limits.check)
        # The template has written the special tokens itself.
        return self._encode(rendered, limits, add_special_tokens=False)

    def detokenizer(self) -> Detokenizer:
        """A fresh incremental decoder."""
        return Detokenizer(self._tokenizer, self._special_ids)

    def _encode(self, text: str, limits: WorkLimits, add_special_tokens: bool) -> list[int]:
        try:
            if len(text.encode()) > BYTES_A_TOKEN * limits.tokens:
                self._count(text, limits)
            ids: list[int] = self._encoding(text, add_special_tokens).ids
        except EncodingError:
            raise
        except Exception as error:  # the library has no narrower one
            raise EncodingError(f"the tokenizer does not take this prompt: {error}") from None
        return ids

    def _count(self, text: str, limits: WorkLimits) -> None:
        """Raises EncodingError as soon as the pieces of the text have too many tokens; the tokens are not kept."""
        counted = TOKENS_A_CUT
        for start in range(0, len(text), PIECE_CHARACTERS):
            limits.check()
            piece = self._encoding(text[start : start + PIECE_CHARACTERS], add_special_tokens=False)
            counted += len(piece) - TOKENS_A_CUT
            if counted > limits.tokens:
                raise EncodingError(f"the prompt has more than {limits.tokens:g} tokens")

    def _encoding(self, text: str, add_special_tokens: bool) -> Any:
        # A batch of one, because `encode` holds the interpreter's lock while other requests are streamed.
        with panics_are_errors():
            return self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0]


def _read(tokenizer_json: bytes) -> Tokenizer:
    try:
        with panics_are_errors():
            tokenizer = Tokenizer.from_str(tokenizer_json.decode())
    except Exception as error:  # the library has no narrower one
        raise TokenizerError(f"tokenizer.json is broken: {error}") from None
    # A file may carry the settings of some training run; prompts are neither cut nor padded.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _check_ids(vocabulary: Mapping[str, int], eos_token_ids: Iterable[int], vocab_size: int | None) -> None:
    if not vocabulary:
        raise TokenizerError("the tokenizer has no vocabulary")
    largest = max(*vocabulary.values(), *eos_token_ids, -1)
    if vocab_size is not None and largest >= vocab_size:
        raise TokenizerError(
            f"the tokenizer has token id {largest}, not below the model's vocabulary size {vocab_size}"
        )
