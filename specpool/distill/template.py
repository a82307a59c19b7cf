"""The tokens around a question and an answer, taken from a target's chat template."""

from dataclasses import dataclass
from typing import Any

QUESTION = "QUESTION-OF-THE-USER"


@dataclass(frozen=True)
class ChatTemplate:
    """One exchange: what comes before the question, between it and the answer, and the tokens that end either."""

    before_question: tuple[int, ...]
    before_answer: tuple[int, ...]
    ends: frozenset[int]
    tokenizer: Any

    @classmethod
    def of(cls, tokenizer: Any, ends: frozenset[int]) -> "ChatTemplate":
        """The template of a transformers tokenizer. ValueError if it is not made of turns."""
        messages = [{"role": "user", "content": QUESTION}]
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        if text.count(QUESTION) != 1:
            raise ValueError("the chat template does not hold a user's question once")
        before, after = text.split(QUESTION)

        def encode(part: str) -> tuple[int, ...]:
            return tuple(tokenizer.encode(part, add_special_tokens=False))

        return cls(encode(before), encode(after), ends, tokenizer)

    def encode(self, text: str) -> list[int]:
        """Tokens of plain text."""
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False)
        return ids
