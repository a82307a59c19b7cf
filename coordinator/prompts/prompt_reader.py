"""Converts the prompt of a request to token ids. Cheap checks run before anything is tokenized."""

import json
from dataclasses import astuple

from coordinator.prompts.chat_reader import OPTIONS, check_chat, read_chat
from coordinator.prompts.templates import NO_TEMPLATE
from coordinator.prompts.token_reader import TokenReader
from coordinator.prompts.tokenizer_pool import Check, Prompt, TokenizerPool
from specpool.protocol.errors import InvalidArgumentError
from specpool.v1 import generation_pb2 as pb

# Options of a chat template that an error lists.
MAX_LISTED = 32

FIELDS = {"text": "text", "tokenized": "tokenized.input_ids", "chat": "chat.messages"}


class PromptReader(TokenReader):
    def check(self, request: pb.GenerateRequest) -> None:
        """Check a prompt as far as possible without tokenizing it. Raises InvalidArgumentError."""
        kind = request.WhichOneof("input")
        if kind is None:
            raise InvalidArgumentError("input", f"one of {', '.join(FIELDS)} must be set")
        if kind == "tokenized":
            self.check_length("tokenized.input_ids", len(request.tokenized.input_ids))
        elif kind == "text":
            self.check_bytes("text", len(request.text.encode()))
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
            return await self.token_ids("tokenized.input_ids", request.tokenized)
        is_chat = kind == "chat"

        def content() -> object:
            return astuple(read_chat(request.chat)) if is_chat else request.text

        size = request.chat.ByteSize() if is_chat else len(request.text.encode())
        prompt = Prompt(client, size, content, is_chat, self.max_tokens, self.max_bytes)
        return await self.encode(FIELDS[kind], prompt, pool, before)

    def _check_chat(self, chat: pb.ChatInput) -> None:
        self.check_bytes("chat.messages", check_chat(chat))
        template = self.tokenizer.tool_template if chat.tools else self.tokenizer.template
        if template is None:
            raise InvalidArgumentError("chat.messages", NO_TEMPLATE)
        if chat.tools and not template.reads_tools:
            raise InvalidArgumentError("chat.tools", "the chat template does not support tools")
        if unknown := set(chat.chat_template_kwargs.fields) - template.options:
            known = ", ".join(sorted(template.options)[:MAX_LISTED]) or "none"
            reason = f"the chat template has no option {json.dumps(min(unknown))}; its options: {known}"
            raise InvalidArgumentError(OPTIONS, reason)
