"""Validates the texts and token ids of requests, and tokenizes the texts within the limits of a prompt."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from coordinator.prompts.description import TokenizerDescription
from coordinator.prompts.tokenizer_pool import Check, Prompt, PromptError, TokenizerPool, TooLongError
from specpool.protocol.errors import InvalidArgumentError
from specpool.v1 import generation_pb2 as pb

# Token ids to check before yielding to the event loop.
IDS_PER_TURN = 16_384


@dataclass(frozen=True)
class TokenReader:
    tokenizer: TokenizerDescription
    max_model_len: int
    vocab_size: int

    @property
    def max_tokens(self) -> int:
        """Maximum tokens of a prompt, which leaves one position to generate."""
        return self.max_model_len - 1

    @property
    def max_bytes(self) -> int:
        """Maximum bytes of text: `max_tokens` times the longest token of the vocabulary."""
        return self.max_tokens * self.tokenizer.longest_token_bytes

    def check_bytes(self, field: str, size: int) -> None:
        """Raise InvalidArgumentError if a text is too large. `size`: in bytes."""
        if size > self.max_bytes:
            reason = f"has {size} bytes, more than {self.max_bytes}, the maximum for {self.max_tokens} tokens"
            raise InvalidArgumentError(field, reason, limit=self.max_bytes)

    def check_length(self, field: str, tokens: int) -> None:
        """Raise InvalidArgumentError if there are no tokens, or too many."""
        if not tokens:
            raise InvalidArgumentError(field, "must not be empty")
        if tokens > self.max_tokens:
            reason = f"has {tokens} tokens, more than {self.max_tokens}"
            raise InvalidArgumentError(field, reason, limit=self.max_tokens)

    async def token_ids(self, field: str, tokenized: pb.TokenizedInput) -> tuple[int, ...]:
        """Return a client's token ids after validation. Raises InvalidArgumentError."""
        ids: list[int] = []
        for start in range(0, len(tokenized.input_ids), IDS_PER_TURN):
            if start:
                await asyncio.sleep(0)
            chunk = tokenized.input_ids[start : start + IDS_PER_TURN]
            self._check_ids(field, chunk)
            ids += chunk
        return tuple(ids)

    async def encode(self, field: str, prompt: Prompt, pool: TokenizerPool, before: Check) -> tuple[int, ...]:
        """Tokenize a validated text or chat. `before` runs right before tokenization.

        Raises InvalidArgumentError, QueueFullError, UnavailableError, and the errors of `before`.
        """
        try:
            ids = await pool.encode(prompt, before)
        except TooLongError as error:
            if error.tokens is not None:
                self.check_length(field, error.tokens)
            reason = f"has more than {self.max_tokens} tokens"
            raise InvalidArgumentError(field, reason, limit=self.max_tokens) from None
        except PromptError as error:
            raise InvalidArgumentError(field, str(error)) from None
        self.check_length(field, len(ids))
        self._check_ids(field, ids)
        return tuple(ids)

    def _check_ids(self, field: str, ids: Sequence[int]) -> None:
        if (largest := max(ids)) >= self.vocab_size:
            reason = f"token id {largest} must be below the vocabulary size {self.vocab_size}"
            raise InvalidArgumentError(field, reason, limit=self.vocab_size - 1)
