"""Compiled grammars, their readers, and a cache with a memory limit.

All readers of a compiled grammar share its lexer, which adds states with every mask and fails permanently when it has
too many. Only a lexer that has read nothing else can tell whether the grammar fails after a text.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from itertools import takewhile
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from llguidance import LLMatcher

Words = NDArray[np.uint32]
"""One bit per vocabulary token: whether the token is allowed."""
BITS, ALL = 32, np.uint32(2**32 - 1)
RECENT = 32
"""Number of trailing tokens in which two texts of a sequence usually differ."""


def full_mask(vocab_size: int) -> Words:
    """Return a new mask that allows all tokens."""
    return np.full(-(-vocab_size // BITS), ALL)


def mask_of(token_ids: Iterable[int], vocab_size: int) -> Words:
    """Return the mask that allows only these tokens."""
    mask = np.zeros(-(-vocab_size // BITS), np.uint32)
    for token in token_ids:
        mask[token // BITS] |= np.uint32(1 << token % BITS)
    return mask


@dataclass(frozen=True)
class EndTokens:
    """The end-of-sequence tokens, as ids and as a mask."""

    ids: frozenset[int]
    mask: Words

    @cached_property
    def other_mask(self) -> Words:
        """The mask of all other tokens."""
        return ~self.mask


class Reader:
    """A grammar matcher and the text it has read."""

    def __init__(self, matcher: LLMatcher, ends: EndTokens) -> None:
        self._matcher, self._ends = matcher, ends
        self._token_ids: list[int] = []
        """The text without end-of-sequence tokens."""
        self._has_ended = False
        """Whether an end-of-sequence token follows."""

    @property
    def failure(self) -> str:
        """Why the matcher failed permanently; empty if it did not. Illegal tokens are not failures."""
        return self._matcher.get_error() or "the grammar failed" if self._matcher.is_error() else ""

    def read(self, token_ids: Sequence[int]) -> bool:
        """Read a whole text, reusing the prefix already read. Return whether the grammar allows it."""
        kept = common_length(self._token_ids, token_ids)
        if kept < len(self._token_ids):
            self._matcher.rollback(len(self._token_ids) - kept)
            del self._token_ids[kept:]
        self._has_ended = False
        return self._read_on(token_ids[kept:])

    def read_token(self, token_id: int, mask: Words) -> None:
        """Read a draft's next token and fill `mask` with the mask after it. If that fails, allow all tokens."""
        if not self._read_on([token_id]) or self.fill(mask):
            mask.fill(ALL)

    def fill(self, mask: Words) -> str:
        """Compute the mask after the text. Return why that failed; empty on success."""
        if self._has_ended:
            mask[:] = self._ends.mask
            return ""
        with suppress(ValueError, RuntimeError):  # the matcher keeps the reason
            self._matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        if reason := self.failure:
            return reason
        if not self._matcher.is_accepting():  # the grammar itself may name tokens that end the text
            mask &= ~self._ends.mask
        return "" if mask.any() else "the grammar allows no token after this text"

    def fill_after(self, token_ids: Sequence[int], mask: Words, also: Words | None = None) -> str:
        """Compute the mask after a complete text. Return the reason for a failure; empty on success.

        `also`: tokens to allow in addition, even after a text that the grammar rejects.
        """
        is_legal = self.read(token_ids)
        if not is_legal and (also is None or self.failure):
            return self.failure or "the text does not match the grammar"
        reason = self.fill(mask) if is_legal else ""
        if also is not None:
            mask[:] = mask | also if is_legal else also
        return reason

    def forced(self, limit: int) -> tuple[int, ...]:
        """Return at most `limit` tokens of the only possible continuation."""
        token_ids = () if self._has_ended else self._matcher.compute_ff_tokens()[:limit]
        return tuple(takewhile(lambda token: token not in self._ends.ids, token_ids))

    def fork(self) -> Reader:
        """Return an independent copy."""
        copy = Reader(self._matcher.deep_copy(), self._ends)
        copy._token_ids, copy._has_ended = [*self._token_ids], self._has_ended
        return copy

    def _read_on(self, token_ids: Sequence[int]) -> bool:
        end = next((place for place, token in enumerate(token_ids) if token in self._ends.ids), len(token_ids))
        if end:
            num_read = 0 if self._has_ended else self._matcher.try_consume_tokens(list(token_ids[:end]))
            self._token_ids += token_ids[:num_read]
            if num_read < end:
                return False
        if end < len(token_ids):
            self._has_ended = self._matcher.is_accepting()
            return self._has_ended and all(token in self._ends.ids for token in token_ids[end:])
        return True


def common_length(one: Sequence[int], other: Sequence[int]) -> int:
    """Return the length of the common prefix of two token lists."""
    length = min(len(one), len(other))
    begin = max(0, length - RECENT)
    if one[:begin] != other[:begin]:
        begin = 0
    return next((place for place in range(begin, length) if one[place] != other[place]), length)


class Lexer:
    """A compiled grammar with its readers."""

    def __init__(self, matcher: LLMatcher, ends: EndTokens, max_bytes: int, is_large: bool) -> None:
        """`matcher`: must have read nothing. `max_bytes`: upper estimate of the memory, however much is read."""
        self._start: Reader | None = Reader(matcher, ends)
        self.max_bytes, self.is_large = max_bytes, is_large
        """`is_large`: whether it may grow to the maximum number of states, which makes masks slow."""
        self.is_closed = False
        self._readers: WeakKeyDictionary[object, Reader] = WeakKeyDictionary()
        self._lock = threading.Lock()
        """Held while a reader is in use."""

    @contextmanager
    def reading(self, owner: object) -> Iterator[Reader | None]:
        """Yield the owner's reader with exclusive use of the lexer; None if it is closed. A new reader is empty."""
        try:
            with self._lock:
                reader = self._readers.get(owner)
                if reader is None and self._start is not None:
                    reader = self._readers[owner] = self._start.fork()
                yield reader
        finally:
            self._free_if_closed()

    def close(self) -> None:
        """Free the memory once no reader is in use."""
        self.is_closed = True
        self._free_if_closed()

    def _free_if_closed(self) -> None:
        if self.is_closed and self._lock.acquire(blocking=False):  # else its holder calls this afterwards
            self._start = None
            self._readers.clear()
            self._lock.release()


class LexerCache:
    """Thread-safe cache of lexers by grammar, with a memory limit. Evicts the least recently used."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._lexers: OrderedDict[str, Lexer] = OrderedDict()  # least recently used first
        self._lock = threading.Lock()

    @property
    def num_bytes(self) -> int:
        """Upper estimate of the memory of all lexers, in bytes."""
        with self._lock:
            return sum(lexer.max_bytes for lexer in self._lexers.values())

    def get(self, grammar: str) -> Lexer | None:
        """Return the grammar's lexer and mark it as most recently used; None if it was evicted or never compiled."""
        with self._lock:
            if grammar in self._lexers:
                self._lexers.move_to_end(grammar)
            return self._lexers.get(grammar)

    def put(self, grammar: str, lexer: Lexer) -> None:
        """Add or replace a grammar's lexer. Evict others until all fit."""
        with self._lock:
            replaced = self._lexers.pop(grammar, None)
            if replaced is not None:
                replaced.close()
            size = lexer.max_bytes + sum(other.max_bytes for other in self._lexers.values())
            while self._lexers and size > self._max_bytes:
                _, evicted = self._lexers.popitem(last=False)
                evicted.close()
                size -= evicted.max_bytes
            self._lexers[grammar] = lexer
