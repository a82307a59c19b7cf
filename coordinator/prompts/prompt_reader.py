"""Converts the prompt of a request to token ids. Cheap checks run before anything is tokenized."""

import asyncio
import json
from dataclasses import astuple, dataclass

from coordinator.prompts.chat_reader import OPTIONS, check_chat, read_chat
from coordinator.prompts.description import TokenizerDescription
from coordinator.prompts.templates import NO_TEMPLATE
from coordinator.prompts.tokenizer_pool import Check, Prompt, PromptError, TokenizerPool, TooLongError
from specpool.protocol.errors import InvalidArgumentError
from specpool.v1 import generation_pb2 as pb

# Options of a chat template that an error lists.
MAX_LISTED = 32

# Token ids that are checked before the event loop gets a turn.
IDS_PER_TURN = 16_384

FIELDS = {"text": "text", "tokenized": "tokenized.input_ids", "chat": "chat.messages"}


@dataclass(frozen=True)
class PromptReader:
    tokenizer: TokenizerDescription
    max_model_len: int
    vocab_size: int

    @property
    def max_tokens(self) -> int:
        """Maximum tokens of a prompt. One position is left to generate."""
        return self.max_model_len - 1

    @property
    def max_bytes(self) -> int:
        """Maximum bytes of text: `max_tokens` times the longest token of the vocabulary."""
        return self.max_tokens * self.tokenizer.longest_token_bytes

    def check(self, request: pb.GenerateRequest) -> None:
        """Check a prompt as far as possible without tokenizing it. Raises InvalidArgumentError."""
        kind = request.WhichOneof("input")
        if kind is None:
            raise InvalidArgumentError("input", f"one of {', '.join(FIELDS)} must be set")
        if kind == "tokenized":
            self._check_length("tokenized.input_ids", len(request.tokenized.input_ids))
        elif kind == "text":
            self._check_bytes("text", len(request.text.encode()))
        else:
            self._check_chat(request.chat)

    async def read(
        self, request: pb.GenerateRequest, client: str, pool: TokenizerPool, before: Check
    ) -> tuple[int, ...]:
        """Return the token ids of a client's checked prompt. `before` runs right before tokenization.

        Raises InvalidArgumentError, QueueFullError, UnavailableError, and the errors of `before`.
        """
        kind = request.WhichOneof("input")
        assert kind is not None
        if kind == "tokenized":
            return await self._token_ids(request.tokenized)
        is_chat = kind == "chat"

        def content() -> object:
            return astuple(read_chat(request.chat)) if is_chat else request.text

        prompt = Prompt(client, request.ByteSize(), content, is_chat, self.max_tokens, self.max_bytes)
        try:
            ids = await pool.encode(prompt, before)
        except TooLongError as error:
            self._check_length(FIELDS[kind], error.tokens)
            raise InvalidArgumentError(FIELDS[kind], str(error)) from None
        except PromptError as error:
            raise InvalidArgumentError(FIELDS[kind], str(error)) from None
        self._check_length(FIELDS[kind], len(ids))
        self._check_ids(FIELDS[kind], ids)
        return tuple(ids)

    async def _token_ids(self, tokenized: pb.TokenizedInput) -> tuple[int, ...]:
        ids: list[int] = []
        for start in range(0, len(tokenized.input_ids), IDS_PER_TURN):
            if start:
                await asyncio.sleep(0)
            chunk = tokenized.input_ids[start : start + IDS_PER_TURN]
            self._check_ids("tokenized.input_ids", chunk)
            ids += chunk
        return tuple(ids)

    def _check_chat(self, chat: pb.ChatInput) -> None:
        self._check_bytes("chat.messages", check_chat(chat))
        template = self.tokenizer.tool_template if chat.tools else self.tokenizer.template
        if template is None:
            raise InvalidArgumentError("chat.messages", NO_TEMPLATE)
        if chat.tools and not template.reads_tools:
            raise InvalidArgumentError("chat.tools", "the chat template does not support tools")
        if unknown := set(chat.chat_template_kwargs.fields) - template.options:
            known = ", ".join(sorted(template.options)[:MAX_LISTED]) or "none"
            reason = f"the chat template has no option {json.dumps(min(unknown))}; its options: {known}"
            raise InvalidArgumentError(OPTIONS, reason)

    def _check_bytes(self, field: str, size: int) -> None:
        if size > self.max_bytes:
            why = f"the maximum for {self.max_tokens} tokens"
            reason = f"the prompt has {size} bytes, more than {self.max_bytes}, {why}"
            raise InvalidArgumentError(field, reason, limit=self.max_bytes)

    def _check_length(self, field: str, tokens: int) -> None:
        if not tokens:
            raise InvalidArgumentError(field, "the prompt is empty")
        if tokens > self.max_tokens:
            reason = f"the prompt has {tokens} tokens, more than {self.max_tokens}"
            raise InvalidArgumentError(field, reason, limit=self.max_tokens)

    def _check_ids(self, field: str, ids: list[int]) -> None:
        if (largest := max(ids)) >= self.vocab_size:
            reason = f"token id {largest} must be below the vocabulary size {self.vocab_size}"
            raise InvalidArgumentError(field, reason, limit=self.vocab_size - 1)
