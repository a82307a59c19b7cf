"""A tokenizer as plain data."""

import hashlib
import json
from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True)
class TokenizerFiles:
    """Everything that another process needs to encode and decode text like the model."""

    tokenizer_json: bytes
    chat_template: str
    special_tokens: dict[str, str]
    eos_token_ids: tuple[int, ...]
    tool_chat_template: str = ""
    """Chat template for requests with tools. Empty if `chat_template` serves them too."""

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 of the vocabulary. Models with equal fingerprints use the same token ids."""
        tokenizer = json.loads(self.tokenizer_json)
        added = [[token["id"], token["content"]] for token in tokenizer["added_tokens"]]
        return hashlib.sha256(json.dumps([tokenizer["model"]["vocab"], added], sort_keys=True).encode()).hexdigest()
