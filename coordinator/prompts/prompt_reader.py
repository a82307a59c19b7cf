"""The prompt of a request as token ids: what can be refused at little cost is refused before anything is tokenized."""

import asyncio
from dataclasses import dataclass

from coordinator.prompts.templates import ChatTemplateError
from coordinator.prompts.tokenizer import EncodingError, TargetTokenizer, WorkLimits
from coordinator.prompts.tokenizer_pool import Check, TokenizerPool
from specpool.protocol.errors import InvalidArgumentError
from specpool.v1 import generation_pb2 as pb

MAX_MESSAGES, MAX_ROLE_LENGTH = 1024, 64

# Ids that are copied and checked between two turns of the event loop.
IDS_AT_ONCE = 16_384

FIELDS = {"text": "text", "tokenized": "tokenized.input_ids", "chat": "chat.messages"}


@dataclass(frozen=True)
class PromptReader:
    """Reads prompts for one model."""

    tokenizer: TargetTokenizer
    max_model_len: int
    vocab_size: int

    @property
    def most_tokens(self) -> int:
        """Most tokens of a prompt: one position is left for what is generated."""
        return self.max_model_len - 1

    @property
    def most_bytes(self) -> int:
        """Most bytes of text: more would be too many tokens, even if each were the longest of the vocabulary."""
        return self.most_tokens * self.tokenizer.longest_token_bytes

    def check(self, request: pb.GenerateRequest) -> None:
        """InvalidArgumentError for a prompt that cannot be taken, as far as that is known without its tokens."""
        kind = request.WhichOneof("input")
        if kind is None:
            raise InvalidArgumentError("input", f"one of {', '.join(FIELDS)} must be set")
        if kind == "tokenized":
            self._check_length("tokenized.input_ids", len(request.tokenized.input_ids))
        elif kind == "text":
            self._check_bytes("text", len(request.text.encode()))
        else:
            self._check_chat(request.chat)

    async def read(self, request: pb.GenerateRequest, slots: TokenizerPool, before: Check) -> tuple[int, ...]:
        """Token ids of a prompt that `check` has passed. `before` is called right before long work begins.

        InvalidArgumentError, QueueFullError, and what `before` raises.
        """
        kind = request.WhichOneof("input")
        assert kind is not None
        if kind == "tokenized":
            return await self._token_ids(request.tokenized)
        encode = self._text if kind == "text" else self._chat
        try:
            return await slots.run(request.ByteSize(), lambda check: encode(request, check), before)
        except (ChatTemplateError, EncodingError) as error:
            raise InvalidArgumentError(FIELDS[kind], str(error), may_quote=True) from None

    def _text(self, request: pb.GenerateRequest, check: Check) -> tuple[int, ...]:
        return self._checked("text", self.tokenizer.encode_text(request.text, self._work_limits(check)))

    def _chat(self, request: pb.GenerateRequest, check: Check) -> tuple[int, ...]:
        messages = [(message.role, message.content) for message in request.chat.messages]
        return self._checked("chat.messages", self.tokenizer.encode_chat(messages, self._work_limits(check)))

    def _work_limits(self, check: Check) -> WorkLimits:
        return WorkLimits(self.most_tokens, self.most_bytes, check)

    def _checked(self, field: str, ids: list[int]) -> tuple[int, ...]:
        self._check_length(field, len(ids))
        self._check_ids(field, ids)
        return tuple(ids)

    async def _token_ids(self, tokenized: pb.TokenizedInput) -> tuple[int, ...]:
        ids: list[int] = []
        for start in range(0, len(tokenized.input_ids), IDS_AT_ONCE):
            if start:
                await asyncio.sleep(0)
            some = tokenized.input_ids[start : start + IDS_AT_ONCE]
            self._check_ids("tokenized.input_ids", some)
            ids += some
        return tuple(ids)

    def _check_chat(self, chat: pb.ChatInput) -> None:
        if not chat.messages:
            raise InvalidArgumentError("chat.messages", "must not be empty")
        if len(chat.messages) > MAX_MESSAGES:
            raise InvalidArgumentError("chat.messages", f"has more than {MAX_MESSAGES} entries")
        size = 0
        for index, message in enumerate(chat.messages):
            if not 1 <= len(message.role) <= MAX_ROLE_LENGTH:
                refusal = "must not be empty" if not message.role else f"has more than {MAX_ROLE_LENGTH} characters"
                raise InvalidArgumentError(f"chat.messages[{index}].role", refusal)
            size += len(message.content.encode())
        self._check_bytes("chat.messages", size)

    def _check_bytes(self, field: str, size: int) -> None:
        if size > self.most_bytes:
            why = f"the most that {self.most_tokens} tokens can have"
            raise InvalidArgumentError(field, f"the prompt has {size} bytes, more than {self.most_bytes}, {why}")

    def _check_length(self, field: str, tokens: int) -> None:
        if not tokens:
            raise InvalidArgumentError(field, "the prompt is empty")
        if tokens > self.most_tokens:
            raise InvalidArgumentError(field, f"the prompt has {tokens} tokens, more than {self.most_tokens}")

    def _check_ids(self, field: str, ids: list[int]) -> None:
        if (largest := max(ids)) >= self.vocab_size:
            raise InvalidArgumentError(field, f"token id {largest} is not below the vocabulary size {self.vocab_size}")
