"""The grammar of a sequence, and the jobs that compute its masks on other threads.

A mask depends only on the tokens before it, so masked choices are the same in every batch and with every draft. Whether
there is a mask depends on nothing else either: a lexer that fails is replaced by a new one, which reads the whole text.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Protocol
from weakref import ref

import numpy as np

from specpool.engine.sampling.lexers import EndTokens, Lexer, Reader, Words, common_length


class LexerSource(Protocol):
    """Compiles grammars."""

    def cached(self, grammar: str) -> Lexer | None:
        """The grammar's lexer; None if it was evicted."""

    def compile(self, grammar: str, is_large: bool) -> Lexer:
        """A new lexer that has read nothing. Takes up to tenths of a second. Raises GrammarError."""

    def keep(self, grammar: str, lexer: Lexer) -> None:
        """Make this the lexer of all sequences with the grammar."""


class SlowMaskError(Exception):
    """A mask may take long, and the calling thread must not wait for it."""


class SequenceGrammar:
    """The grammar of one sequence. For the model thread; jobs use its lexer on other threads, one job at a time."""

    def __init__(self, source: LexerSource, grammar: str, prompt_length: int, ends: EndTokens) -> None:
        self._source, self._grammar, self._begin, self._ends = source, grammar, prompt_length, ends
        self._lexer: Lexer | None = None
        self._job: MaskJob | None = None
        self._settled: tuple[MaskJob, list[Words]] | None = None
        """The last job, and the masks that it had when it was awaited."""

    @property
    def is_busy(self) -> bool:
        """Whether a job has not ended."""
        return self._job is not None and not self._job.ended.is_set()

    def wait(self, seconds: float) -> bool:
        """Wait up to `seconds` for the last job. Return whether it has ended."""
        return self._job is None or self._job.ended.wait(seconds)

    def start(self, token_ids: Sequence[int], count: int) -> MaskJob:
        """A job for the masks of `count` rows, which follow the last tokens of the sequence."""
        self._job, self._settled = MaskJob(self, token_ids, count, self._job), None
        return self._job

    def settle(self, job: MaskJob) -> None:
        """Use the masks that a job has computed so far."""
        self._settled = job, [*job.masks]

    def masks(self, token_ids: Sequence[int], count: int) -> list[Words | None]:
        """The masks of the last job's rows. Other rows get those that take little time.

        None: the row follows an illegal draft token, or its mask failed or takes too long.
        """
        if self._settled is None or not self._settled[0].is_for(token_ids, count):
            if self.is_busy:
                return [None] * count
            job = self.start(token_ids, count)
            with suppress(SlowMaskError):
                while job.step(may_take_long=False):
                    pass
            job.ended.set()
            job.settle()
        assert self._settled is not None
        masks = self._settled[1]
        return [*masks, *[None] * (count - len(masks))]

    @property
    def num_masks(self) -> int:
        """Leading rows of the last job that have a mask. Choices of later rows are void."""
        return 0 if self._settled is None else len(self._settled[1])

    @property
    def failure(self) -> str:
        """Why the first row of the last job never gets a mask. Empty if it may."""
        return "" if self._settled is None or self._settled[1] else self._settled[0].failure

    def forced(self, token_ids: Sequence[int], limit: int) -> tuple[int, ...]:
        """At most `limit` tokens of the only text that may follow the sequence, as the tokenizer splits it."""
        with self._reading_fast() as reader:
            if limit <= 0 or reader is None or not reader.read(token_ids[self._begin :]):
                return ()
            return reader.forced(limit)

    def fork(self, token_ids: Sequence[int]) -> Reader | None:
        """A reader of this continuation of the sequence, for a draft. None: its masks may take long."""
        with self._reading_fast() as reader:
            fork = None if reader is None else reader.fork()
        return fork if fork is not None and fork.read(token_ids[self._begin :]) else None

    @contextmanager
    def _reading_fast(self) -> Iterator[Reader | None]:
        """Yield the reader; None if its masks may take long."""
        lexer = None
        with suppress(SlowMaskError):
            lexer = None if self.is_busy else self._current_lexer(may_take_long=False)
        if lexer is None:
            yield None
            return
        with lexer.reading(self) as reader:
            yield reader

    def compute(self, token_ids: Sequence[int], is_draft: bool, may_take_long: bool) -> Words | str:
        """The mask after the tokens, or why there is none. For jobs.

        `is_draft`: whether the last token is a draft token, which needs no mask at any cost. SlowMaskError: the mask
        may take long, but must not.
        """
        mask = self._mask(self._current_lexer(may_take_long), token_ids)
        if is_draft or not isinstance(mask, str):
            return mask
        if not may_take_long:
            raise SlowMaskError
        # Only a lexer that has read nothing else says whether the grammar fails after these tokens.
        lexer = self._source.compile(self._grammar, is_large=True)
        mask = self._mask(lexer, token_ids)
        if not isinstance(mask, str):
            self._source.keep(self._grammar, lexer)
            self._lexer = lexer
        return mask

    def _current_lexer(self, may_take_long: bool) -> Lexer:
        lexer = self._lexer
        if lexer is None or lexer.is_closed:
            lexer = self._lexer = self._source.cached(self._grammar)
        if not may_take_long and (lexer is None or lexer.is_large):
            raise SlowMaskError
        if lexer is None:
            lexer = self._lexer = self._source.compile(self._grammar, is_large=False)
            self._source.keep(self._grammar, lexer)
        return lexer

    def _mask(self, lexer: Lexer, token_ids: Sequence[int]) -> Words | str:
        with lexer.reading(self) as reader:
            if reader is None:
                return "the grammar was evicted"
            mask = np.empty_like(self._ends.mask)
            if reader.read(token_ids[self._begin :]):
                return reader.fill(mask) or mask
            return reader.failure or "the text does not match the grammar"


class MaskJob:
    """Computes the masks of rows in order. Ends early once stopped, but not before the first row."""

    def __init__(
        self, grammar: SequenceGrammar, token_ids: Sequence[int], count: int, previous: MaskJob | None
    ) -> None:
        self._grammar = ref(grammar)  # a released sequence needs no masks
        self._token_ids, self._count = [*token_ids], count
        self._first = len(token_ids) - count + 1
        self.masks: list[Words] = []
        """Masks so far. They only grow."""
        self.failure = ""
        """Why the first row has no mask."""
        self.ended = threading.Event()
        self.is_stopped = False
        """Whether later rows are not needed."""
        if previous is not None and previous.ended.is_set():
            self.masks += previous._masks_of(self._token_ids, self._first)

    def is_for(self, token_ids: Sequence[int], count: int) -> bool:
        """Whether it computes the masks of these rows."""
        return self._count == count and self._token_ids == token_ids

    def _masks_of(self, token_ids: list[int], first: int) -> list[Words]:
        """Its masks of rows of a sequence from `first` on."""
        end = common_length(self._token_ids, token_ids) + 1
        return self.masks[first - self._first : end - self._first] if self._first <= first < end else []

    def run(self) -> None:
        """Compute all rows, however long each takes."""
        while self.step(may_take_long=True):
            pass

    def step(self, may_take_long: bool) -> bool:
        """Compute the mask of the next row. Return whether another one follows.

        SlowMaskError: it may take long, but must not.
        """
        grammar, row = self._grammar(), len(self.masks)
        if grammar is not None and row < self._count and not (row and self.is_stopped):
            mask = grammar.compute(self._token_ids[: self._first + row], row > 0, may_take_long)
            if not isinstance(mask, str):
                self.masks.append(mask)
                return True
            self.fail(mask)
        self.ended.set()
        return False

    def settle(self) -> None:
        """End after the next mask, unless it has ended, and let the sequence use the masks so far."""
        self.is_stopped = True
        if (grammar := self._grammar()) is not None:
            grammar.settle(self)

    def fail(self, reason: str) -> None:
        """End without another mask."""
        if not self.masks:
            self.failure = reason
        self.ended.set()
