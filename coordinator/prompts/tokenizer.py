"""The target's tokenizer, built from files that the target worker sends. Needs neither torch nor a model hub.

The files are untrusted: the coordinator uses this class in prompt processes only.
"""

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from tokenizers import Tokenizer

from coordinator.prompts.chat_formats import AUTO, LEADING, find_tags
from coordinator.prompts.templates import NO_TEMPLATE, Chat, ChatTemplate, ChatTemplateError
from specpool.protocol.sampling import MAX_TAG_TOKENS
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
    """The text cannot be tokenized."""


class TooManyTokensError(EncodingError):
    """The text has too many tokens. Counting stops at the limit."""


@dataclass(frozen=True)
class WorkLimits:
    """Limits on the work for one text or chat."""

    tokens: float = math.inf
    """Maximum tokens. Much longer prompts are rejected before all of their tokens are known."""
    characters: float = math.inf
    """Maximum output of the chat template."""


UNLIMITED = WorkLimits()


class TargetTokenizer:
    def __init__(self, files: TokenizerFiles, vocab_size: int | None = None) -> None:
        """Raise TokenizerError if the files are broken, or if the vocabulary exceeds the model's `vocab_size`.

        Added tokens may exceed it: only prompts with such a token are rejected.
        """
        self.files = files
        self._tokenizer = _load(files.tokenizer_json)
        self._vocab_size = math.inf if vocab_size is None else vocab_size
        vocabulary = self._tokenizer.get_vocab(with_added_tokens=False)
        _check_ids(vocabulary or self._tokenizer.get_vocab(), files.eos_token_ids, vocab_size)
        self._template = _template(files.chat_template, files)
        self._tool_template = _template(files.tool_chat_template, files) or self._template

    def describe(self, reasoning_tags: str = AUTO) -> dict[str, Any]:
        """Describe the tokenizer as `coordinator.prompts.description` reads it.

        `reasoning_tags`: see `chat_formats.find_tags`. Raises TokenizerError if the model has no tokens for them.
        """
        added = self._tokenizer.get_added_tokens_decoder()
        ids = sorted({*self._tokenizer.get_vocab(with_added_tokens=False).values(), *added})
        tokens = [self._tokenizer.id_to_token(token_id) for token_id in ids]
        special = {token.content for token in added.values() if token.special}
        decoder = self._tokenizer.decoder
        return {
            "ids": ids,
            "tokens": tokens,
            "special_ids": [token_id for token_id, token in zip(ids, tokens, strict=True) if token in special],
            "decoder": None if decoder is None else json.loads(decoder.__getstate__()),
            "templates": [
                None if template is None else [template.reads_tools, sorted(template.options)]
                for template in (self._template, self._tool_template)
            ],
            "reasoning": self._describe_reasoning(reasoning_tags),
        }

    def encode_text(self, text: str, limits: WorkLimits = UNLIMITED, *, add_special_tokens: bool = True) -> list[int]:
        """Tokenize text, by default with the model's special tokens around it. Raises EncodingError."""
        return self._encode(text, limits, add_special_tokens)

    def render(self, chat: Chat, limits: WorkLimits = UNLIMITED) -> str:
        """Render a chat, up to the assistant's turn. Raises ChatTemplateError, MemoryError."""
        template = self._tool_template if chat.tools else self._template
        if template is None:
            raise ChatTemplateError(NO_TEMPLATE)
        return template.render(chat, limits.characters)

    def encode_rendered(self, rendered: str, limits: WorkLimits = UNLIMITED) -> list[int]:
        """Tokenize a rendered chat, which has its special tokens already. Raises EncodingError."""
        return self.encode_text(rendered, limits, add_special_tokens=False)

    def encode_chat(self, chat: Chat, limits: WorkLimits = UNLIMITED) -> list[int]:
        """Tokenize a chat, up to the assistant's turn. Raises ChatTemplateError, EncodingError."""
        return self.encode_rendered(self.render(chat, limits), limits)

    def _describe_reasoning(self, setting: str) -> list[Any] | None:
        """Return the fields of `ReasoningTags`, or None if the model has no tags."""
        templates = self.files.chat_template + self.files.tool_chat_template
        tags = find_tags(setting, templates, self._is_token)
        if tags is None:
            return None
        begin, end, answer = (self._encode(text, UNLIMITED, False) for text in (tags.begin, tags.end, tags.answer))
        if not begin or not end or max(begin + end) >= self._vocab_size:
            raise TokenizerError(f"the model has no tokens for the reasoning tags {tags.begin} and {tags.end}")
        if max(len(begin), len(end + answer)) > MAX_TAG_TOKENS:
            raise TokenizerError(f"a reasoning tag has more than {MAX_TAG_TOKENS} tokens")
        leading = [ids[0] for ids in (self._encode(text, UNLIMITED, False) for text in LEADING) if len(ids) == 1]
        return [tags.begin, tags.end, begin, end, answer, leading]

    def _is_token(self, text: str) -> bool:
        token_id = self._tokenizer.token_to_id(text)
        return token_id is not None and token_id < self._vocab_size

    def _encode(self, text: str, limits: WorkLimits, add_special_tokens: bool) -> list[int]:
        try:
            if len(text.encode()) > BYTES_PER_TOKEN * limits.tokens:
                self._check_length(text, limits)
            return self._tokenize(text, add_special_tokens)
        except (EncodingError, MemoryError, KeyboardInterrupt):
            raise
        except BaseException as error:  # the library has no narrower class, and its panics are no exceptions
            raise EncodingError(f"the tokenizer rejects it: {error}") from None

    def _check_length(self, text: str, limits: WorkLimits) -> None:
        """Count tokens piece by piece. Raises TooManyTokensError as soon as there are too many."""
        counted = TOKENS_PER_CUT
        for start in range(0, len(text), PIECE_CHARACTERS):
            piece = self._tokenize(text[start : start + PIECE_CHARACTERS], add_special_tokens=False)
            counted += len(piece) - TOKENS_PER_CUT
            if counted > limits.tokens:
                raise TooManyTokensError(f"has more than {limits.tokens:g} tokens")

    def _tokenize(self, text: str, add_special_tokens: bool) -> list[int]:
        # A batch of one: `encode` would also compute offsets.
        ids: list[int] = self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
        return ids


def _load(tokenizer_json: bytes) -> Tokenizer:
    try:
        tokenizer = Tokenizer.from_str(tokenizer_json.decode())
    except (MemoryError, KeyboardInterrupt):
        raise
    except BaseException as error:  # the library has no narrower class, and its panics are no exceptions
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
