"""Compiled grammars within a limit of memory, and their readers.

All readers of a compiled grammar share its lexer, which adds states with every mask and fails for good when it has too
many. Only a lexer that has read no other text tells whether the grammar fails after a text.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import takewhile
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from llguidance import LLMatcher

Words = NDArray[np.uint32]
"""A bit for each token of the vocabulary: whether the token is allowed."""
BITS, ALL = 32, np.uint32(2**32 - 1)
RECENT = 32
"""Last tokens in which texts of the same sequence usually differ."""


def mask_of(token_ids: Iterable[int], vocab_size: int) -> Words:
    """The mask that allows only these tokens."""
    mask = np.zeros(-(-vocab_size // BITS), np.uint32)
    for token in token_ids:
        mask[token // BITS] |= np.uint32(1 << token % BITS)
    return mask


@dataclass(frozen=True)
class EndTokens:
    """The end-of-sequence tokens, as ids and as a mask."""

    ids: frozenset[int]
    mask: Words


class Reader:
    """A matcher of a grammar, and the text that it has read."""

    def __init__(self, matcher: LLMatcher, ends: EndTokens) -> None:
        self._matcher, self._ends = matcher, ends
        self._token_ids: list[int] = []
        """The text without end-of-sequence tokens."""
        self._has_ended = False
        """Whether an end-of-sequence token follows."""

    @property
    def failure(self) -> str:
        """Why the matcher failed, which is for good. Empty if it did not; illegal tokens are not failures."""
        return self._matcher.get_error() or "the grammar failed" if self._matcher.is_error() else ""

    def read(self, token_ids: Sequence[int]) -> bool:
        """Read a whole text, most of which it may have read before. Return whether the grammar allows it."""
        kept = common_length(self._token_ids, token_ids)
        if kept < len(self._token_ids):
            self._matcher.rollback(len(self._token_ids) - kept)
            del self._token_ids[kept:]
        self._has_ended = False
        return self._read_on(token_ids[kept:])

    def read_token(self, token_id: int, mask: Words) -> None:
        """Read a draft's next token, and replace `mask` with the mask after it. If that fails, allow all tokens."""
        if not self._read_on([token_id]) or self.fill(mask):
            mask.fill(ALL)

    def fill(self, mask: Words) -> str:
        """Compute the mask after the text. Return why there is none; empty if there is one."""
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

    def forced(self, limit: int) -> tuple[int, ...]:
        """At most `limit` tokens of the only text that may follow."""
        token_ids = () if self._has_ended else self._matcher.compute_ff_tokens()[:limit]
        return tuple(takewhile(lambda token: token not in self._ends.ids, token_ids))

    def fork(self) -> Reader:
        """A copy that reads on by itself."""
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
    """Number of leading tokens that two lists have in common."""
    length = min(len(one), len(other))
    begin = max(0, length - RECENT)
    if one[:begin] != other[:begin]:
        begin = 0
    return next((place for place in range(begin, length) if one[place] != other[place]), length)


class Lexer:
    """A compiled grammar with its readers."""

    def __init__(self, matcher: LLMatcher, ends: EndTokens, max_bytes: int, is_large: bool) -> None:
        """`matcher`: has read nothing. `max_bytes`: upper estimate of the memory, however much is read."""
        self._start: Reader | None = Reader(matcher, ends)
        self.max_bytes, self.is_large = max_bytes, is_large
        """`is_large`: whether it may have the maximum number of states, so that masks may take long."""
        self.is_closed = False
        self._readers: WeakKeyDictionary[object, Reader] = WeakKeyDictionary()
        self._lock = threading.Lock()
        """Held while a reader is in use."""

    @contextmanager
    def reading(self, owner: object) -> Iterator[Reader | None]:
        """Yield the owner's reader, alone on this lexer; None if the lexer is closed. A new reader has read nothing."""
        try:
            with self._lock:
                reader = self._readers.get(owner)
                if reader is None and self._start is not None:
                    reader = self._readers[owner] = self._start.fork()
                yield reader
        finally:
            self._free_if_closed()

    def close(self) -> None:
        """Free the memory, once the reader in use is done."""
        self.is_closed = True
        self._free_if_closed()

    def _free_if_closed(self) -> None:
        if self.is_closed and self._lock.acquire(blocking=False):  # else its holder calls this afterwards
            self._start = None
            self._readers.clear()
            self._lock.release()


class LexerCache:
    """Lexers by grammar, within a limit of memory. Evicts those that were used least recently. For any thread."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._lexers: OrderedDict[str, Lexer] = OrderedDict()  # least recently used first
        self._lock = threading.Lock()

    @property
    def num_bytes(self) -> int:
        """Upper estimate of the memory of all lexers."""
        with self._lock:
            return sum(lexer.max_bytes for lexer in self._lexers.values())

    def get(self, grammar: str) -> Lexer | None:
        """The grammar's lexer, which becomes the most recently used. None: it was evicted, or never compiled."""
        with self._lock:
            if grammar in self._lexers:
                self._lexers.move_to_end(grammar)
            return self._lexers.get(grammar)

    def put(self, grammar: str, lexer: Lexer) -> None:
        """Add a lexer in place of the grammar's last one. Evict others until all fit."""
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
