"""The target's tokenizer as the coordinator knows it, from a prompt process's description."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from coordinator.prompts.chat_formats import MAX_TAG_CHARACTERS, tool_call_format
from coordinator.prompts.detokenizer import Detokenizer, TokenTexts, Vocabulary, read_decoder
from coordinator.prompts.reasoning import ReasoningTags
from specpool.protocol.sampling import MAX_TAG_TOKENS
from specpool.protocol.tokenizer import TokenizerFiles

MAX_TOKEN_BYTES = 4096
MAX_OPTIONS, MAX_OPTION_CHARACTERS = 1024, 256
# Maximum number of whitespace tokens after the begin tag at the end of a chat prompt.
MAX_SPACE_TOKENS = 8


class TokenizerError(ValueError):
    """The target's tokenizer cannot be used."""


@dataclass(frozen=True)
class TemplateDescription:
    reads_tools: bool
    options: frozenset[str]
    """Names of the variables that requests may set."""


@dataclass(frozen=True)
class TokenizerDescription:
    """The target's tokenizer. Decodes generated tokens; prompt processes encode prompts."""

    files: TokenizerFiles
    longest_token_bytes: int
    """Upper bound on the bytes of text of one token."""
    template: TemplateDescription | None
    tool_template: TemplateDescription | None
    """For chats with tools."""
    vocabulary: Vocabulary
    reasoning: ReasoningTags | None = None

    @cached_property
    def token_texts(self) -> TokenTexts:
        """Text of each token."""
        return TokenTexts(self.vocabulary)

    @property
    def tool_call_format(self) -> str:
        """Tool call format that the chat template asks for. Empty if unknown, or if the template ignores tools."""
        reads_tools = self.tool_template is not None and self.tool_template.reads_tools
        return tool_call_format(self.files.tool_chat_template or self.files.chat_template) if reads_tools else ""

    def detokenizer(self, prompt_ids: Sequence[int] = (), skip_special_tokens: bool = True) -> Detokenizer:
        """Return a detokenizer for the tokens generated after a prompt."""
        return Detokenizer(self.vocabulary, prompt_ids, skip_special_tokens)

    def starts_in_reasoning(self, prompt_ids: Sequence[int], is_chat: bool) -> bool:
        """Whether a prompt ends within a reasoning block. In a chat, only a tag at the very end can open it."""
        count = self.reasoning.num_open(prompt_ids) if self.reasoning is not None else None
        if count is None or not is_chat:
            return count is not None
        after = prompt_ids[len(prompt_ids) - count :]
        return count <= MAX_SPACE_TOKENS and not Detokenizer(self.vocabulary, (), False).feed(after).strip()


def read_description(body: bytes, files: TokenizerFiles) -> TokenizerDescription:
    """Read the untrusted description of a tokenizer. Raises TokenizerError."""
    try:
        value = json.loads(body)
        tokens = dict(zip(value["ids"], value["tokens"], strict=True))
        longest = max(map(_token_bytes, tokens.values()))
        special = value["special_ids"]
        if not all(type(token_id) is int for token_id in [*tokens, *special]):
            raise TypeError
        template, tool_template = map(_template, value["templates"])
        decode = read_decoder(value["decoder"])
        reasoning = _reasoning_tags(value["reasoning"])
    except (KeyError, TypeError, UnicodeEncodeError, json.JSONDecodeError, RecursionError) as error:
        raise TokenizerError(f"its description is malformed: {type(error).__name__}") from None
    except ValueError as error:
        raise TokenizerError(str(error)) from None
    vocabulary = Vocabulary(tokens, frozenset(special), decode)
    return TokenizerDescription(files, longest, template, tool_template, vocabulary, reasoning)


def _token_bytes(token: Any) -> int:
    if type(token) is not str:
        raise TypeError
    if (size := len(token.encode())) > MAX_TOKEN_BYTES:
        raise ValueError(f"it has a token of {size} bytes, more than {MAX_TOKEN_BYTES}")
    return size


def _template(value: Any) -> TemplateDescription | None:
    if value is None:
        return None
    reads_tools, options = value
    if len(options) > MAX_OPTIONS or any(len(name) > MAX_OPTION_CHARACTERS for name in options):
        raise ValueError("its chat template has too many options, or too long names")
    return TemplateDescription(bool(reads_tools), frozenset(map(str, options)))


def _reasoning_tags(value: Any) -> ReasoningTags | None:
    if value is None:
        return None
    begin, end, *ids = value
    begin_ids, end_ids, answer_ids, leading_ids = map(tuple, ids)
    are_texts = all(type(text) is str and len(text) <= MAX_TAG_CHARACTERS for text in (begin, end))
    are_ids = all(type(token_id) is int and token_id >= 0 for each in ids for token_id in each)
    if not (are_texts and are_ids and begin_ids and end_ids and max(map(len, ids)) <= MAX_TAG_TOKENS):
        raise ValueError("its reasoning tags are malformed")
    return ReasoningTags(begin, end, begin_ids, end_ids, answer_ids, leading_ids)
