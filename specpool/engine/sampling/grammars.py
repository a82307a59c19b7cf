"""Grammars of sequences: masks of allowed tokens for the samplers, and forced tokens.

llguidance compiles grammars and computes masks without the interpreter lock, so both overlap with forward passes. A
mask depends only on the tokens before it, so masked choices are the same in every batch and with every draft.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from itertools import takewhile
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from specpool.environment.extras import explain_missing
from specpool.protocol.tokenizer import TokenizerFiles

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

log = logging.getLogger(__name__)

Words = NDArray[np.uint32]
"""A bit for each token of the vocabulary: whether the token is allowed."""

MAX_GRAMMARS = 256
"""Maximum number of compiled grammars to keep."""
BITS = 32


def mask_of(token_ids: Iterable[int], vocab_size: int) -> Words:
    """The mask that allows only these tokens."""
    mask = np.zeros(-(-vocab_size // BITS), np.uint32)
    for token in token_ids:
        mask[token // BITS] |= np.uint32(1 << token % BITS)
    return mask


class SequenceGrammar:
    """The grammar of one sequence, and its position in the sequence."""

    def __init__(self, start: LLMatcher, prompt_length: int, end_ids: frozenset[int], end_mask: Words) -> None:
        """`start`: a matcher that has read nothing. `end_ids`, `end_mask`: end-of-sequence tokens."""
        self._start, self._matcher, self._begin = start, start.deep_copy(), prompt_length
        self._end_ids, self._end_mask = end_ids, end_mask
        self._read = 0
        """Number of tokens that the matcher has read."""
        self._has_ended = False
        """Whether an end-of-sequence token follows them."""
        self._computed: tuple[tuple[int, int], list[Words | None]] | None = None
        """Masks computed in advance, with the length and count they are for."""
        self._failure: tuple[int, str] | None = None
        """The row of the last masks for which the grammar failed, and why. Illegal draft tokens are not failures."""

    def truncate(self, length: int) -> None:
        """Forget all but the first `length` tokens of the sequence."""
        self._computed = None
        kept = max(0, length - self._begin)
        if kept <= self._read:
            self._has_ended = False
        if self._matcher.is_error():  # it never recovers
            self._matcher, self._read, self._has_ended = self._start.deep_copy(), 0, False
        elif kept < self._read:
            self._matcher.rollback(self._read - kept)
            self._read = kept

    def error_in(self, count: int) -> str:
        """Why the grammar failed in one of the first `count` rows of the last masks. Empty if it did not."""
        return self._failure[1] if self._failure is not None and self._failure[0] < count else ""

    def fail(self, reason: str) -> None:
        """Record that there are no masks."""
        self._failure = 0, reason

    def fork(self, token_ids: Sequence[int]) -> SequenceGrammar:
        """A copy that has read this continuation of the sequence, for a draft."""
        copy = object.__new__(SequenceGrammar)
        copy.__dict__.update(self.__dict__, _matcher=self._matcher.deep_copy(), _computed=None)
        copy._advance(token_ids)
        return copy

    def compute(self, token_ids: Sequence[int], count: int) -> None:
        """Compute masks in advance, in any thread. The next call of `masks` with the same arguments returns them."""
        self._computed = (len(token_ids), count), self._masks(token_ids, count)

    def masks(self, token_ids: Sequence[int], count: int) -> list[Words | None]:
        """The mask of each of `count` rows, which follow the last tokens of the sequence.

        Apart from `truncate`, a sequence may only grow between calls. None: the row follows an illegal draft token, or
        the grammar failed.
        """
        computed, self._computed = self._computed, None
        if computed is not None and computed[0] == (len(token_ids), count):
            return computed[1]
        return self._masks(token_ids, count)

    def forced(self, token_ids: Sequence[int], limit: int) -> tuple[int, ...]:
        """At most `limit` tokens of the only text that may follow the sequence, as the tokenizer splits it."""
        if limit <= 0 or not self._advance(token_ids) or self._has_ended:
            return ()
        return tuple(takewhile(lambda token: token not in self._end_ids, self._matcher.compute_ff_tokens()[:limit]))

    def read_token(self, token_id: int, mask: Words) -> None:
        """Read the next token, and replace `mask` with the mask after it."""
        self._read_all([token_id])
        self._fill(mask)

    def _masks(self, token_ids: Sequence[int], count: int) -> list[Words | None]:
        first = len(token_ids) - count + 1
        self.truncate(first)
        masks: list[Words | None] = [None] * count
        can_read = self._advance(token_ids[:first])
        self._failure = None if can_read else (0, "the text does not match the grammar")
        for row in range(count):
            if not can_read:
                break
            mask = np.empty_like(self._end_mask)
            if reason := self._fill(mask):
                self._failure = row, reason
                break
            masks[row] = mask
            can_read = self._read_all(token_ids[first + row : first + row + 1])
        return masks

    def _advance(self, token_ids: Sequence[int]) -> bool:
        """Read the rest of a sequence. Return whether the grammar allows it."""
        return self._read_all(token_ids[self._begin + self._read :])

    def _read_all(self, token_ids: Sequence[int]) -> bool:
        end = next((place for place, token in enumerate(token_ids) if token in self._end_ids), len(token_ids))
        if end and (self._has_ended or self._read_text(token_ids[:end]) < end):
            return False
        if end < len(token_ids):
            self._has_ended = self._matcher.is_accepting()
            return self._has_ended and all(token in self._end_ids for token in token_ids[end:])
        return True

    def _read_text(self, token_ids: Sequence[int]) -> int:
        """Read tokens up to the first that is not allowed. Return their number."""
        num_read = self._matcher.try_consume_tokens(list(token_ids))
        self._read += num_read
        return num_read

    def _fill(self, mask: Words) -> str:
        """Compute the mask after the tokens read. Return why it failed; empty if it did not."""
        if self._has_ended:
            mask[:] = self._end_mask
            return ""
        with suppress(ValueError, RuntimeError):  # the matcher keeps the reason
            self._matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        if self._matcher.is_error():
            return self._matcher.get_error() or "the grammar failed"
        if not self._matcher.is_accepting():  # the grammar itself may name tokens that end the text
            mask &= ~self._end_mask
        return "" if mask.any() else "the grammar allows no token after this text"


class Grammars:
    """Compiles grammars and computes masks for one tokenizer, each on its own thread."""

    def __init__(self, files: TokenizerFiles, vocab_size: int) -> None:
        self._files, self._vocab_size = files, vocab_size
        self._end_ids, self._end_mask = frozenset(files.eos_token_ids), mask_of(files.eos_token_ids, vocab_size)
        self._tokenizer: Future[LLTokenizer] | None = None
        self._compiled: OrderedDict[str, Future[LLMatcher]] = OrderedDict()  # least recently used first
        self._compiling = ThreadPoolExecutor(1, "grammars")
        self._masking = ThreadPoolExecutor(1, "masks")
        self.why_unsupported = explain_missing("constraints")
        """Why grammars are unsupported; None if they are supported."""

    def wait(self, grammar: str, seconds: float) -> bool:
        """Wait up to `seconds` for a grammar. Return whether its compilation has succeeded or failed."""
        if self.why_unsupported:
            return True
        if grammar not in self._compiled and not self._has_room():
            return False
        with suppress(TimeoutError):
            self._compile(grammar).exception(seconds)
            return True
        return False

    def _has_room(self) -> bool:
        """Whether another grammar can be kept. Those being compiled are never dropped."""
        if len(self._compiled) < MAX_GRAMMARS:
            return True
        oldest = next((each for each, future in self._compiled.items() if future.done()), None)
        if oldest is not None:
            del self._compiled[oldest]
        return oldest is not None

    def error_of(self, grammar: str) -> str:
        """Why a grammar cannot be used. Empty if it can. Waits until it is compiled."""
        if self.why_unsupported:
            return self.why_unsupported
        error = self._compile(grammar).exception()
        return "" if error is None else str(error)

    def start(self, grammar: str, prompt_length: int) -> SequenceGrammar:
        """The grammar for a new sequence. Waits until it is compiled. Raises GrammarError."""
        return SequenceGrammar(self._compile(grammar).result(), prompt_length, self._end_ids, self._end_mask)

    def compute(self, work: Iterable[tuple[SequenceGrammar, Sequence[int], int]]) -> Future[None] | None:
        """Call `SequenceGrammar.compute` with these arguments on another thread. None: no work."""
        listed = list(work)
        if not listed:
            return None

        def run() -> None:
            for grammar, token_ids, count in listed:
                try:
                    grammar.compute(token_ids, count)
                except Exception as error:  # fails its own sequence only
                    log.exception("a mask failed")
                    grammar.fail(f"the grammar failed: {error}")

        return self._masking.submit(run)

    def _compile(self, grammar: str) -> Future[LLMatcher]:
        future = self._compiled.pop(grammar, None)
        if future is None:
            future = self._compiling.submit(self._compiled_with, self._loaded(), grammar)
        self._compiled[grammar] = future
        return future

    @staticmethod
    def _compiled_with(tokenizer: Future[LLTokenizer], grammar: str) -> LLMatcher:
        from specpool.protocol.grammars import compile_grammar

        return compile_grammar(tokenizer.result(), grammar)

    def _loaded(self) -> Future[LLTokenizer]:
        """The tokenizer, whose loading begins with the first call."""
        if self._tokenizer is None:
            from specpool.protocol.grammars import load_grammar_tokenizer

            self._tokenizer = self._compiling.submit(load_grammar_tokenizer, self._files, self._vocab_size)
        return self._tokenizer
