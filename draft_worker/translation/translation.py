"""Translation between the tokens of a target and of a draft with another tokenizer.

The target verifies every token, so a wrong translation costs speed but never changes the output.

Sources: Timor et al. 2025, "Accelerating LLM Inference with Lossless Speculative Decoding Algorithms for Heterogeneous
Vocabularies" (token-level intersection, and string-level exact match).
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from draft_worker.translation.vocabulary import Vocabulary, num_incomplete
from specpool.protocol.worker_info import TRANSLATIONS

SHARED, RETOKENIZED = TRANSLATIONS
"""Methods: map tokens with the same text one to one and re-encode only the others, or re-encode all text."""


@dataclass(frozen=True)
class Translation:
    """Token maps in both directions. Tokens missing from a map are translated by their text."""

    method: str
    target: Vocabulary
    draft: Vocabulary
    to_draft: Mapping[int, int]
    to_target: Mapping[int, int]
    coverage: float
    """Share of the target's vocabulary that is also in the draft's."""
    vocab_size: int
    """Vocabulary size of the target."""
    ratio: float = 1.0
    """Draft tokens per target token in the sample text."""

    def num_draft_tokens(self, count: int) -> int:
        """Return the expected number of draft tokens for `count` target tokens."""
        return math.ceil(count * self.ratio)

    def proposal(
        self, draft_ids: Sequence[int], chances: Sequence[float], limit: int, tail: Sequence[int] = ()
    ) -> tuple[tuple[int, ...], tuple[float, ...]]:
        """Translate a draft into at most `limit` target tokens. Return them with their probabilities.

        `chances`: the draft's probability of each token, or empty. `tail`: the sequence's last target tokens, if their
        text ends inside a character.
        """
        writer = _Writer(self.target, tail)
        for index, draft_id in enumerate(draft_ids):
            chance = chances[index] if chances else 1.0
            if (target_id := self.to_target.get(draft_id)) is not None:
                writer.add(target_id, chance)
            elif text := self.draft.texts.get(draft_id):
                writer.write(text, chance)
            else:  # a special token that the target lacks
                break
        writer.flush(is_last=True)
        return tuple(writer.token_ids[:limit]), tuple(writer.chances[:limit]) if chances else ()


class _Writer:
    """Converts a draft's tokens and text to target tokens."""

    def __init__(self, target: Vocabulary, tail: Sequence[int]) -> None:
        self.token_ids: list[int] = []
        self.chances: list[float] = []
        self._target, self._tail = target, [*tail]
        self._text = bytearray()
        self._starts: list[tuple[int, float]] = []
        """Offset in `_text` and probability of each draft token."""

    def add(self, token_id: int, chance: float) -> None:
        self.flush()
        self.token_ids.append(token_id)
        self.chances.append(chance)

    def write(self, text: bytes, chance: float) -> None:
        self._starts.append((len(self._text), chance))
        self._text += text

    def flush(self, *, is_last: bool = False) -> None:
        """Encode the text so far. A token's probability is the product over all draft tokens that begin in it.

        `is_last`: no text follows, so drop an incomplete character at the end.
        """
        text = bytes(self._text[: len(self._text) - num_incomplete(self._text)] if is_last else self._text)
        encoded, texts, end = self._encode(text), self._target.texts, 0
        starts = iter([*self._starts, (math.inf, 1.0)])
        start, chance = next(starts)
        for token_id in encoded:
            end += len(texts.get(token_id, b""))
            product = 1.0
            while start < end:
                product *= chance
                start, chance = next(starts)
            self.token_ids.append(token_id)
            self.chances.append(product)
        self._text.clear()
        self._starts.clear()
        self._tail.clear()

    def _encode(self, text: bytes) -> list[int]:
        tail = self._tail
        if tail and text:
            before = b"".join(self._target.texts.get(token_id, b"") for token_id in tail)
            encoded = self._target.encode(before + text)
            if encoded[: len(tail)] == tail:
                return encoded[len(tail) :]
        return self._target.encode(text)
