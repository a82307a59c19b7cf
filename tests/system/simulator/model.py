"""Toy models whose right answers are known in advance.

The target hashes the whole context to choose a token, so one lost, repeated or swapped token changes all that follow.
"""

import zlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

VOCAB_SIZE, EOS = 257, 256
TOP = 4
"""Tokens that the draft ranks after each position."""

Context = tuple[Sequence[int], int]
"""All tokens before a position, and the seed of the sequence (0: greedy)."""


@dataclass(frozen=True)
class ToyPair:
    """A target and its draft. `agreement`: share of contexts after which both choose the same token."""

    agreement: float
    eos_rate: float

    def choose(self, context: Context) -> int:
        """The target's next token."""
        digest = _digest(context)
        return EOS if digest % 1000 < self.eos_rate * 1000 else digest // 1000 % EOS

    def draft(self, context: Context) -> int:
        """The draft's next token."""
        return self.rank(context)[0]

    def rank(self, context: Context) -> list[int]:
        """The draft's best tokens. Where its first one is wrong, the second one is often right."""
        digest, right = _digest(context) >> 8, self.choose(context)
        others = [(right + 1 + digest % 7 + i) % VOCAB_SIZE for i in range(TOP - 1)]
        place = 0 if digest % 100 < self.agreement * 100 else 1 + digest % 3
        return [*others[:place], right, *others[place:]]

    def answer(self, prompt: Sequence[int], max_tokens: int, seed: int) -> list[int]:
        """The tokens of plain decoding."""
        tokens = list(prompt)
        while len(tokens) < len(prompt) + max_tokens:
            tokens.append(self.choose((tokens, seed)))
            if tokens[-1] == EOS:
                break
        return tokens[len(prompt) :]


def _digest(context: Context) -> int:
    tokens, seed = context
    return zlib.crc32(array("I", tokens), seed)
