"""The grammar of a sequence, and the jobs that compute its masks on other threads.

A mask depends only on the tokens before it, so masked choices are the same in every batch and with every draft. Whether
a mask exists depends only on them, too: a lexer that fails is replaced by a new one that reads the whole text.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from weakref import ref

import numpy as np

from specpool.engine.sampling.lexers import EndTokens, Lexer, LexerCache, Reader, Words, common_length
from specpool.engine.sampling.reasoning import Limit, ReasoningBlock


class SlowMaskError(Exception):
    """A mask may be slow, and the calling thread must not wait for it."""


class SequenceGrammar:
    """The grammar state of one sequence, for the model thread. Jobs use its lexer on other threads, one at a time."""

    def __init__(
        self,
        compile_lexer: Callable[[str, bool], Lexer],
        lexers: LexerCache,
        grammar: str,
        prompt_length: int,
        ends: EndTokens,
        block: ReasoningBlock | None = None,
    ) -> None:
        """`compile_lexer`, `lexers`: see `Grammars.compile` and `Grammars.lexers`. `block`: before the grammar."""
        self._compile, self._lexers = compile_lexer, lexers
        self._grammar, self._whole, self._ends, self._block = grammar, Limit(prompt_length), ends, block
        self._lexer: Lexer | None = None
        self._job: MaskJob | None = None
        self._settled: tuple[MaskJob, list[Words]] | None = None
        """The last job, and its masks when `settle` was called."""

    @property
    def is_busy(self) -> bool:
        """Whether the last job is still running."""
        return self._job is not None and not self._job.ended.is_set()

    def wait(self, seconds: float) -> bool:
        """Wait up to `seconds` for the last job. Return whether it has ended."""
        return self._job is None or self._job.ended.wait(seconds)

    def start(self, token_ids: Sequence[int], count: int) -> MaskJob | None:
        """Create a job for the masks of `count` rows, which follow the last tokens of the sequence.

        None: the last job is still running.
        """
        self._settled = None
        if self.is_busy:
            return None
        self._job = MaskJob(self, token_ids, count, self._limits(token_ids, count), self._job)
        return self._job

    def _limits(self, token_ids: Sequence[int], count: int) -> list[Limit]:
        return [self._whole] * count if self._block is None else self._block.limits(token_ids, count)

    def settle(self, job: MaskJob) -> None:
        """Use the masks that a job has computed so far."""
        self._settled = job, [*job.masks]

    def masks(self, token_ids: Sequence[int], count: int) -> list[Words | None]:
        """Return the masks of the rows: those of the last job if it was for them, else those that are quick to compute.

        A mask is None if the row follows an illegal draft token, or if the mask failed or is too slow.
        """
        if self._settled is None or not self._settled[0].is_for(token_ids, count):
            job = self.start(token_ids, count)
            if job is None:
                return [None] * count
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
        """Number of leading rows of the last job with a mask. Choices of later rows are invalid."""
        return 0 if self._settled is None else len(self._settled[1])

    @property
    def failure(self) -> str:
        """Why the first row of the last job can have no mask; empty if it has one or may still get one."""
        return "" if self._settled is None or self._settled[1] else self._settled[0].failure

    def forced(self, token_ids: Sequence[int], limit: int) -> tuple[int, ...]:
        """Return at most `limit` tokens of the only possible continuation, as the tokenizer splits it."""
        ((begin, others),) = self._limits(token_ids, 1)
        if limit <= 0 or begin is None or others is not None:
            return ()
        with self._reading_fast() as reader:
            return reader.forced(limit) if reader is not None and reader.read(token_ids[begin:]) else ()

    def fork(self) -> Reader | None:
        """Return an independent reader for a draft; None if its masks may be slow."""
        with self._reading_fast() as reader:
            return None if reader is None else reader.fork()

    @contextmanager
    def _reading_fast(self) -> Iterator[Reader | None]:
        """Yield the reader; None if its masks may be slow."""
        lexer = None
        with suppress(SlowMaskError):
            lexer = None if self.is_busy else self._current_lexer(may_take_long=False)
        if lexer is None:
            yield None
            return
        with lexer.reading(self) as reader:
            yield reader

    def compute(self, token_ids: Sequence[int], limit: Limit, is_draft: bool, may_take_long: bool) -> Words | str:
        """Return the mask after the tokens, or why there is none. Called by jobs.

        `limit`: limit on the next token. `is_draft`: whether the last token is a draft token, after which a mask may
        be missing. Raises SlowMaskError if the mask may be slow, unless `may_take_long`.
        """
        if limit.grammar_begin is None:
            assert limit.mask is not None, "end-of-sequence tokens are masked before a grammar"
            return limit.mask
        text = token_ids[limit.grammar_begin :]
        mask = self._mask(self._current_lexer(may_take_long), text, limit.mask)
        if is_draft or not isinstance(mask, str):
            return mask
        if not may_take_long:
            raise SlowMaskError
        # Only a lexer that has read nothing else can tell whether the grammar fails after these tokens.
        lexer = self._compile(self._grammar, True)
        mask = self._mask(lexer, text, limit.mask)
        if not isinstance(mask, str):
            self._lexers.put(self._grammar, lexer)
            self._lexer = lexer
        return mask

    def _current_lexer(self, may_take_long: bool) -> Lexer:
        lexer = self._lexer
        if lexer is None or lexer.is_closed:
            lexer = self._lexer = self._lexers.get(self._grammar)
        if not may_take_long and (lexer is None or lexer.is_large):
            raise SlowMaskError
        if lexer is None:
            lexer = self._lexer = self._compile(self._grammar, False)
            self._lexers.put(self._grammar, lexer)
        return lexer

    def _mask(self, lexer: Lexer, text: Sequence[int], others: Words | None) -> Words | str:
        with lexer.reading(self) as reader:
            if reader is None:
                return "the grammar was evicted"
            mask = np.empty_like(self._ends.mask)
            return reader.fill_after(text, mask, others) or mask


class MaskJob:
    """Computes the masks of rows in order. A stopped job ends early, but not before the first row."""

    def __init__(
        self,
        grammar: SequenceGrammar,
        token_ids: Sequence[int],
        count: int,
        limits: Sequence[Limit],
        previous: MaskJob | None,
    ) -> None:
        self._grammar = ref(grammar)  # a released sequence needs no masks
        self._token_ids, self._count, self._limits = [*token_ids], count, limits
        self._first = len(token_ids) - count + 1
        self.masks: list[Words] = []
        """Masks computed so far. Only appended to."""
        self.failure = ""
        """Why the first row has no mask."""
        self.ended = threading.Event()
        self.is_stopped = False
        """Whether rows after the first are no longer needed."""
        if previous is not None and previous.ended.is_set():
            self.masks += previous._masks_of(self._token_ids, self._first)

    def is_for(self, token_ids: Sequence[int], count: int) -> bool:
        """Return whether the job is for exactly these rows."""
        return self._count == count and self._token_ids == token_ids

    def _masks_of(self, token_ids: list[int], first: int) -> list[Words]:
        """Return the job's masks that are valid for a sequence's rows from `first` on."""
        end = common_length(self._token_ids, token_ids) + 1
        return self.masks[first - self._first : end - self._first] if self._first <= first < end else []

    def run(self) -> None:
        """Compute all rows, however long each takes."""
        while self.step(may_take_long=True):
            pass

    def step(self, may_take_long: bool) -> bool:
        """Compute the mask of the next row. Return whether another row may follow.

        Raises SlowMaskError if the mask may be slow, unless `may_take_long`.
        """
        grammar, row = self._grammar(), len(self.masks)
        if grammar is not None and row < self._count and not (row and self.is_stopped):
            context = self._token_ids[: self._first + row]
            mask = grammar.compute(context, self._limits[row], row > 0, may_take_long)
            if not isinstance(mask, str):
                self.masks.append(mask)
                return True
            self.fail(mask)
        self.ended.set()
        return False

    def settle(self) -> None:
        """Stop the job after its current mask, and give the sequence the masks computed so far."""
        self.is_stopped = True
        if (grammar := self._grammar()) is not None:
            grammar.settle(self)

    def fail(self, reason: str) -> None:
        """End the job without another mask."""
        if not self.masks:
            self.failure = reason
        self.ended.set()
