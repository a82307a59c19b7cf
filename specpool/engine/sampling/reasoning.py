"""Token limits in and around a sequence's reasoning block, and the position where its grammar begins.

A block opens at the start of the generated text, or in the prompt, and ends with the first end tag. Tags are matched as
token ids, so the same text in other tokens is not a tag. Limits depend only on the tokens before them.
"""

from collections.abc import Sequence
from copy import copy
from functools import lru_cache
from typing import NamedTuple, Self

from specpool.engine.sampling.lexers import ALL, BITS, EndTokens, Reader, Words, mask_of
from specpool.protocol.sampling import Reasoning

TokenIds = tuple[int, ...]


class Limit(NamedTuple):
    """The limit on the next token."""

    grammar_begin: int | None = None
    """Position of the grammar's first token. None: the grammar does not apply."""
    mask: Words | None = None
    """Allowed tokens. With a grammar, it adds to the grammar's own, and None adds none. Otherwise None allows all."""


FREE = Limit()


class ReasoningBlock:
    """Finds the reasoning block of a sequence."""

    def __init__(self, reasoning: Reasoning, prompt_length: int, has_grammar: bool, ends: EndTokens) -> None:
        """`has_grammar`: whether a grammar begins after the block."""
        self._reasoning, self._start, self._has_grammar, self._ends = reasoning, prompt_length, has_grammar, ends
        self._forbids_block = not reasoning.starts_inside and reasoning.max_tokens == 0
        self._openings: tuple[TokenIds, ...] = ()
        """Token sequences that open the block."""
        if not reasoning.starts_inside and not (self._forbids_block and has_grammar):
            self._openings = reasoning.begin, *((token, *reasoning.begin) for token in reasoning.leading)
        # An answer that ends within the block would not match the grammar.
        self._inside = Limit(mask=ends.other_mask) if reasoning.grammar_after else FREE
        self._end: int | None = None
        """End of the block's end tag. None: not found yet."""
        self._num_searched = 0
        """Number of leading tokens already searched for the end tag."""

    def truncate(self, length: int) -> None:
        """Forget all but the first `length` tokens of the sequence."""
        self._num_searched = min(self._num_searched, length)
        if self._end is not None and self._end > length:
            self._end = None

    def limits(self, token_ids: Sequence[int], count: int) -> list[Limit]:
        """Return the limits of `count` rows, which follow the last tokens of the sequence.

        Since the last call, the sequence may only have grown, unless `truncate` was called.
        """
        begin, end = self._find(token_ids)
        lengths = range(len(token_ids) - count + 1, len(token_ids) + 1)
        return [self._limit(token_ids, length, begin, end) for length in lengths]

    def forced(self, token_ids: Sequence[int]) -> TokenIds:
        """Return the rest of the end tag if the block has reached its token limit."""
        begin, end = self._find(token_ids)
        return () if begin is None or end is not None else self._rest_of_tag(token_ids, len(token_ids), begin)

    def fork(self, length: int) -> Self:
        """Return an independent copy for a text that shares its first `length` tokens with the sequence."""
        block = copy(self)
        block.truncate(length)
        return block

    def is_inside(self, token_ids: Sequence[int]) -> bool:
        """Whether a text ends within the block."""
        begin, end = self._find(token_ids)
        return begin is not None and end is None

    def _find(self, token_ids: Sequence[int]) -> tuple[int | None, int | None]:
        """Return the positions after the block's begin tag and after its end tag. None: not reached."""
        begin = self._start
        if not self._reasoning.starts_inside:
            opening = next((each for each in self._openings if self._head(token_ids, len(each)) == each), None)
            if opening is None:
                return None, None
            begin += len(opening)
        if self._end is None:
            tag = self._reasoning.end
            self._end = _end_of(tag, token_ids, max(begin, self._num_searched - len(tag) + 1))
            self._num_searched = len(token_ids)
        return begin, self._end

    def _head(self, token_ids: Sequence[int], count: int) -> TokenIds:
        """Return the first generated tokens, at most `count`."""
        return tuple(token_ids[self._start : self._start + count])

    def _limit(self, token_ids: Sequence[int], length: int, begin: int | None, end: int | None) -> Limit:
        """Return the limit after the first `length` tokens. `begin`, `end`: see `_find`."""
        if end is not None and length >= end:
            return Limit(end) if self._has_grammar else FREE
        if begin is None or length < begin:
            return self._limit_before(token_ids, max(0, length - self._start))
        rest = self._rest_of_tag(token_ids, length, begin)
        return Limit(mask=self._mask_of(rest[:1])) if rest else self._inside

    def _limit_before(self, token_ids: Sequence[int], count: int) -> Limit:
        """Return the limit after `count` generated tokens that have not opened the block."""
        possible = [
            opening
            for opening in self._openings
            if len(opening) > count and opening[:count] == self._head(token_ids, count)
        ]
        if self._forbids_block:
            # Later, the model would have begun a tag that it cannot complete, such as harmony's "<|channel|>analysis".
            rest = max(1, len(self._reasoning.begin) - 1)
            if forbidden := {opening[count] for opening in possible if len(opening) - count == rest}:
                return Limit(mask=~self._mask_of(sorted(forbidden)))
        if not self._has_grammar:
            return FREE
        # With reasoning off, an answer may begin with the same whitespace, which the mask must not force into the tag.
        following = {opening[count] for opening in possible if count or opening == self._reasoning.begin}
        return Limit(self._start, self._mask_of(sorted(following)) if following else None)

    def _rest_of_tag(self, token_ids: Sequence[int], length: int, begin: int) -> TokenIds:
        """Return the forced rest of the end tag after the first `length` tokens, which may contain its beginning."""
        maximum, tag = self._reasoning.max_tokens, self._reasoning.end
        if maximum is None or length - begin < maximum:
            return ()
        tail = tuple(token_ids[max(begin, length - len(tag) + 1) : length])
        size = next(size for size in range(len(tail), -1, -1) if tail[len(tail) - size :] == tag[:size])
        return tag[size:]

    def _mask_of(self, token_ids: Sequence[int]) -> Words:
        return _shared_mask(tuple(token_ids), BITS * len(self._ends.mask))


class LimitedReader:
    """Computes a draft's masks from its reasoning block and its grammar."""

    def __init__(self, block: ReasoningBlock, token_ids: Sequence[int], reader: Reader | None) -> None:
        """`block`: a fork. `token_ids`: the tokens before the draft. `reader`: None if grammar masks may be slow."""
        self._block, self._token_ids, self._reader = block, [*token_ids], reader

    def read_token(self, token_id: int, mask: Words) -> None:
        """Read the draft's next token and fill `mask` with the mask after it. If that fails, allow all tokens."""
        self._token_ids.append(token_id)
        (limit,) = self._block.limits(self._token_ids, 1)
        if limit.grammar_begin is None:
            mask[:] = ALL if limit.mask is None else limit.mask
        elif self._reader is None or self._reader.fill_after(self._token_ids[limit.grammar_begin :], mask, limit.mask):
            mask.fill(ALL)


def _end_of(tag: TokenIds, token_ids: Sequence[int], start: int) -> int | None:
    """Return the end of the first occurrence of a tag at or after `start`, or None."""
    try:
        while True:
            start = token_ids.index(tag[0], start) + 1
            if tuple(token_ids[start : start + len(tag) - 1]) == tag[1:]:
                return start + len(tag) - 1
    except ValueError:
        return None


@lru_cache(64)
def _shared_mask(token_ids: TokenIds, vocab_size: int) -> Words:
    """Return a read-only mask that sequences share."""
    return mask_of(token_ids, vocab_size)
