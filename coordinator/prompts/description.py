"""The target's tokenizer as the coordinator knows it, from a prompt process's description."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from coordinator.prompts.detokenizer import Detokenizer, Vocabulary, read_decoder
from specpool.protocol.tokenizer import TokenizerFiles

MAX_TOKEN_BYTES = 4096
MAX_OPTIONS, MAX_OPTION_CHARACTERS = 1024, 256


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

    def detokenizer(self, prompt_ids: Sequence[int] = ()) -> Detokenizer:
        """Return a detokenizer for the tokens generated after a prompt."""
        return Detokenizer(self.vocabulary, prompt_ids)


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
    except (KeyError, TypeError, UnicodeEncodeError, json.JSONDecodeError, RecursionError) as error:
        raise TokenizerError(f"its description is malformed: {type(error).__name__}") from None
    except ValueError as error:
        raise TokenizerError(str(error)) from None
    for token_id in special:
        tokens.pop(token_id, None)
    return TokenizerDescription(files, longest, template, tool_template, Vocabulary(tokens, decode))


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
