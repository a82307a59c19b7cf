"""The target's tokenizer, from files that the target worker sends: no torch, no model hub."""

import logging
from collections.abc import Iterable, Sequence
from typing import Any

from jinja2 import TemplateError
from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream
from transformers.utils.chat_template_utils import render_jinja_template

from protocol.tokenizer import TokenizerFiles

log = logging.getLogger(__name__)


class ChatTemplateError(ValueError):
    """The model has no chat template, or its template does not take these messages."""


class TargetTokenizer:
    """Encodes prompts and decodes what was generated."""

    def __init__(self, files: TokenizerFiles) -> None:
        self._files = files
        self._tokenizer = Tokenizer.from_str(files.tokenizer_json.decode())
        # A file may carry the settings of some training run; prompts are neither cut nor padded.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Tokens that end a generation."""
        return self._files.eos_token_ids

    @property
    def has_chat_template(self) -> bool:
        """Whether `encode_chat` can work."""
        return bool(self._files.chat_template)

    def encode_text(self, text: str) -> list[int]:
        """Token ids of a text, with the special tokens that the model puts around one."""
        return self._encode(text, add_special_tokens=True)

    def encode_chat(self, messages: Sequence[tuple[str, str]]) -> list[int]:
        """Token ids of a conversation of (role, content), ready for the assistant's turn. ChatTemplateError."""
        if not self.has_chat_template:
            raise ChatTemplateError("the target model has no chat template; send text or tokenized input")
        conversation = [{"role": role, "content": content} for role, content in messages]
        try:
            render: Any = render_jinja_template  # its annotations do not know the template's own variables
            rendered, _ = render(
                conversations=[conversation],
                chat_template=self._files.chat_template,
                add_generation_prompt=True,
                **self._files.special_tokens,
            )
        except TemplateError as error:
            raise ChatTemplateError(f"the model's chat template refuses these messages: {error}") from None
        # The template has written the special tokens itself.
        return self._encode(rendered[0], add_special_tokens=False)

    def _encode(self, text: str, add_special_tokens: bool) -> list[int]:
        # A batch of one, because `encode` holds the interpreter's lock while other requests are streamed.
        ids: list[int] = self._tokenizer.encode_batch([text], add_special_tokens=add_special_tokens)[0].ids
        return ids

    def detokenizer(self) -> "Detokenizer":
        """A fresh incremental decoder."""
        return Detokenizer(self._tokenizer)


class Detokenizer:
    """Turns tokens into text as they come. A character whose bytes are still incomplete waits for the next token."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._stream = DecodeStream(skip_special_tokens=True)
        self._pending: list[int] = []

    def feed(self, token_ids: Iterable[int]) -> str:
        """The text that these tokens complete."""
        pieces = []
        for token_id in token_ids:
            self._pending.append(token_id)
            piece = self._step(token_id)
            if piece is not None:
                pieces.append(piece)
                self._pending.clear()
        return "".join(pieces)

    def _step(self, token_id: int) -> str | None:
        try:
            piece: str | None = self._stream.step(self._tokenizer, token_id)
        except Exception:  # the library has no narrower one
            # With byte fallback, bytes that make no character spoil those before them, whose text is out already.
            self._stream = DecodeStream(ids=self._pending, skip_special_tokens=True)
            piece = self._tokenizer.decode(self._pending, skip_special_tokens=True)
        return piece

    def flush(self) -> str:
        """The remaining text, when no token will follow: replacement characters for incomplete ones."""
        rest: str = self._tokenizer.decode(self._pending, skip_special_tokens=True) if self._pending else ""
        self._pending.clear()
        return rest
