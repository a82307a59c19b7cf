"""The sampling rules of a sequence, in the form that samplers read: sparse changes of each row's logits."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from specpool.engine.sampling.lexers import BITS, Reader, Words, mask_of
from specpool.engine.sampling.masks import SequenceGrammar
from specpool.engine.sampling.reasoning import LimitedReader, ReasoningBlock
from specpool.protocol.sampling import SamplingParams

Ids = NDArray[np.int32]
Floats = NDArray[np.float32]
NO_IDS: Ids = np.empty(0, np.int32)
ABSENT = -1
"""The count of a token that is not in the context. 0: only in the prompt."""


@dataclass(frozen=True)
class Changes:
    """Changes of a row's logits, applied in this order. Each array names a token at most once."""

    bias_ids: Ids = field(default_factory=lambda: NO_IDS)
    biases: Floats = field(default_factory=lambda: np.empty(0, np.float32))
    masked_ids: Ids = field(default_factory=lambda: NO_IDS)
    allowed: Words | None = None
    """Bits of the tokens that the grammar allows. None: all tokens."""
    counted_ids: Ids = field(default_factory=lambda: NO_IDS)
    counts: Ids = field(default_factory=lambda: NO_IDS)
    """How often each of `counted_ids` occurs in the output, for penalties."""


class TokenCounts:
    """Occurrences of each token of a sequence, updated as the sequence grows or is truncated."""

    def __init__(self, prompt_length: int) -> None:
        self._prompt_length = prompt_length
        self._token_ids: list[int] = []  # counted so far
        self._places: dict[int, int] = {}  # of each distinct token in the arrays
        self._distinct: Ids = np.empty(64, np.int32)
        self._occurrences: Ids = np.zeros(64, np.int32)
        self._generated: Ids = np.zeros(64, np.int32)

    def truncate(self, length: int) -> None:
        """Count only the first `length` tokens."""
        while len(self._token_ids) > length:
            place = self._places[self._token_ids.pop()]
            self._occurrences[place] -= 1
            self._generated[place] -= len(self._token_ids) >= self._prompt_length

    def rows(self, token_ids: Sequence[int], count: int) -> tuple[Ids, list[Ids]]:
        """The distinct tokens, and their counts after each of the last `count` tokens of a sequence that has grown."""
        first = len(token_ids) - count + 1
        self.truncate(first)
        for token in token_ids[len(self._token_ids) : first]:
            place = self._place(token)
            self._occurrences[place] += 1
            self._generated[place] += len(self._token_ids) >= self._prompt_length
            self._token_ids.append(token)
        places = [self._place(token) for token in token_ids[first:]]
        size = len(self._places)
        counts = np.where(self._occurrences[:size] > 0, self._generated[:size], ABSENT)
        rows = [counts]
        for position, place in enumerate(places, first):
            counts = counts.copy()
            counts[place] = max(0, counts[place]) + (position >= self._prompt_length)
            rows.append(counts)
        return self._distinct[:size], rows

    def _place(self, token: int) -> int:
        place = self._places.get(token)
        if place is None:
            place = self._places[token] = len(self._places)
            if place == len(self._distinct):
                self._distinct, self._occurrences, self._generated = (
                    np.concatenate([array, np.zeros_like(array)])
                    for array in (self._distinct, self._occurrences, self._generated)
                )
            self._distinct[place] = token
        return place


class SequenceRules:
    """The sampling parameters of a sequence, and the state of its penalties, reasoning block and grammar."""

    def __init__(
        self, params: SamplingParams, grammar: SequenceGrammar | None = None, block: ReasoningBlock | None = None
    ) -> None:
        """`block`: the reasoning block, which precedes the grammar."""
        self.params, self.grammar, self.block = params, grammar, block
        self._bias_ids = np.array([token for token, _ in params.logit_bias], np.int32)
        self._biases = np.array([bias for _, bias in params.logit_bias], np.float32)
        self._stop_ids = np.array(params.stop_token_ids, np.int32)
        self._counts = TokenCounts(params.prompt_length) if params.has_penalties else None

    def truncate(self, length: int) -> None:
        """Forget all but the first `length` tokens of the sequence."""
        if self._counts is not None:
            self._counts.truncate(length)
        if self.block is not None:
            self.block.truncate(length)

    def forced(self, token_ids: Sequence[int], limit: int) -> tuple[int, ...]:
        """Return at most `limit` tokens of the only possible continuation."""
        tag = () if self.block is None else self.block.forced(token_ids)[:limit]
        if self.grammar is None:
            return tag
        return tag + self.grammar.forced([*token_ids, *tag], limit - len(tag))

    def fork(self, token_ids: Sequence[int], shared: int | None = None) -> Reader | LimitedReader | None:
        """Return a reader that computes the masks of a draft after these tokens, or None if it cannot.

        `shared`: number of leading tokens in common with the sequence; None: all.
        """
        reader = None if self.grammar is None else self.grammar.fork()
        if self.block is not None:
            return LimitedReader(self.block.fork(len(token_ids) if shared is None else shared), token_ids, reader)
        return reader if reader is not None and reader.read(token_ids[self.params.prompt_length :]) else None

    def leaves_logits(self, token_ids: Sequence[int], shared: int | None = None) -> bool:
        """Whether the rules change no logit after these tokens, until an open block ends. `shared`: see `fork`."""
        if not self.params.leaves_legal_logits or self.grammar is None:
            return self.params.leaves_legal_logits
        block = None if self.block is None else self.block.fork(len(token_ids) if shared is None else shared)
        return block is not None and block.is_inside(token_ids)

    def changes(self, token_ids: Sequence[int], count: int) -> list[Changes | None]:
        """Return the changes of each of `count` rows, which follow the last tokens of the sequence. None: no change.

        The sequence has grown since the last call, or was truncated to what both have in common.
        """
        params = self.params
        if params.leaves_logits or count == 0:
            return [None] * count
        first = len(token_ids) - count + 1
        ids, rows = (NO_IDS, [NO_IDS] * count) if self._counts is None else self._counts.rows(token_ids, count)
        return [
            self._changes_of(length, allowed, ids, counts)
            for length, (counts, allowed) in enumerate(zip(rows, self._masks(token_ids, count), strict=True), first)
        ]

    def _masks(self, token_ids: Sequence[int], count: int) -> Sequence[Words | None]:
        if self.grammar is not None:
            return self.grammar.masks(token_ids, count)
        if self.block is not None:
            return [limit.mask for limit in self.block.limits(token_ids, count)]
        return [None] * count

    def _changes_of(self, length: int, allowed: Words | None, ids: Ids, counts: Ids) -> Changes | None:
        masked_ids = self._masked_ids(length, allowed)
        if allowed is None and not (self._bias_ids.size or masked_ids.size or ids.size):
            return None
        return Changes(self._bias_ids, self._biases, masked_ids, allowed, ids, counts)

    def _masked_ids(self, length: int, allowed: Words | None) -> Ids:
        """The stop tokens before `min_tokens`, unless the grammar allows nothing else."""
        params = self.params
        if max(0, length - params.prompt_length) >= params.min_tokens:
            return NO_IDS
        if allowed is not None:
            stop_mask = mask_of(params.stop_token_ids, BITS * len(allowed))
            if not (allowed & ~stop_mask).any():
                return NO_IDS
        return self._stop_ids
