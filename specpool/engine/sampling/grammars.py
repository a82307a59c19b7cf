"""Compiles a worker's grammars and schedules the masks of its sequences.

llguidance compiles grammars and computes masks without the interpreter lock, so both overlap with forward passes. Large
lexers run on a separate thread, so they do not delay the masks of other sequences.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from specpool.engine.sampling.lexers import EndTokens, Lexer, LexerCache, mask_of
from specpool.engine.sampling.masks import MaskJob, SequenceGrammar, SlowMaskError
from specpool.engine.sampling.reasoning import ReasoningBlock
from specpool.environment.extras import explain_missing
from specpool.protocol.responses import MAX_ERROR_CHARACTERS
from specpool.protocol.sampling import SamplingParams
from specpool.protocol.tokenizer import TokenizerFiles

if TYPE_CHECKING:
    from llguidance import LLTokenizer

log = logging.getLogger(__name__)

MAX_ERRORS = 256
"""Maximum number of errors to keep."""
SMALL_FUEL = 200_000
"""Fuel of a small lexer's masks."""
SMALL_BYTES, LARGE_BYTES, CHARACTER_BYTES = 4 * 2**20, 22 * 2**20, 20
"""Upper estimates from measurements: sizes of lexers with all their states, and bytes per character of a grammar."""
SLOW_NICENESS = 10


@dataclass(frozen=True)
class GrammarLimits:
    max_compiling: int = 64
    """Maximum number of grammars awaiting compilation."""
    small_states: int = 2000
    """Enough for most schemas. Such a lexer computes most masks in milliseconds. Its failures are never final."""
    max_states: int = 32_000
    """Maximum lexer states; the coordinator uses the same."""
    max_items: int = 2000
    """Maximum parser items per mask; the coordinator uses the same."""


class Grammars:
    """Compiles grammars and computes masks for one tokenizer, on its own threads."""

    def __init__(
        self, files: TokenizerFiles, vocab_size: int, max_bytes: int, limits: GrammarLimits | None = None
    ) -> None:
        """`max_bytes`: memory limit of compiled grammars; 0 turns grammars off."""
        self._files, self._vocab_size = files, vocab_size
        self.limits = limits or GrammarLimits()
        end_ids = frozenset(files.eos_token_ids).intersection(range(vocab_size))  # a draft's vocabulary may be smaller
        self._ends = EndTokens(end_ids, mask_of(end_ids, vocab_size))
        self._tokenizer: Future[LLTokenizer] | None = None
        self.lexers = LexerCache(max_bytes)
        self._waiting: dict[str, Future[None]] = {}
        self._errors: OrderedDict[str, str] = OrderedDict()  # oldest first
        self._lock = threading.Lock()
        self._compiling = ThreadPoolExecutor(1, "grammars")
        self._masking = ThreadPoolExecutor(1, "masks")
        self._slow = ThreadPoolExecutor(1, "slow masks", initializer=_yield_to_others)
        self.why_unsupported = explain_missing("constraints")
        """Why grammars are unsupported; None if they are supported."""
        if not max_bytes:
            self.why_unsupported = "constraints are switched off (grammar_memory is 0)"

    @property
    def num_bytes(self) -> int:
        """Upper estimate of the memory of compiled grammars, in bytes."""
        return self.lexers.num_bytes

    def wait(self, grammar: str, seconds: float) -> bool:
        """Wait up to `seconds` for a grammar. Return whether its compilation has succeeded or failed."""
        if self.why_unsupported or self._is_compiled(grammar):
            return True
        if grammar not in self._waiting and len(self._waiting) >= self.limits.max_compiling:
            return False
        with suppress(TimeoutError):
            self._compilation(grammar).result(seconds)
            return True
        return False

    def error_of(self, grammar: str) -> str:
        """Return why a grammar cannot be used; empty if it can. Waits for its compilation."""
        if self.why_unsupported:
            return self.why_unsupported
        if not self._is_compiled(grammar):
            self._compilation(grammar).result()
        return self._errors.get(grammar, "")

    def block(self, params: SamplingParams) -> ReasoningBlock | None:
        """Return the reasoning block of a new sequence, or None if it is unlimited."""
        if params.reasoning is None or (params.grammar and not params.reasoning.grammar_after):
            return None
        return ReasoningBlock(params.reasoning, params.prompt_length, bool(params.grammar), self._ends)

    def start(self, grammar: str, prompt_length: int, block: ReasoningBlock | None = None) -> SequenceGrammar:
        """Return the grammar state of a new sequence. `error_of` must have returned an empty string.

        `block`: the reasoning block before the grammar.
        """
        return SequenceGrammar(self.compile, self.lexers, grammar, prompt_length, self._ends, block)

    def compute(self, work: Iterable[tuple[SequenceGrammar, Sequence[int], int]]) -> list[MaskJob]:
        """Start a job on another thread for each tuple: a grammar and the arguments of its `start`.

        Skip sequences whose last job is still running, so that slow jobs do not pile up.
        """
        started = [grammar.start(token_ids, count) for grammar, token_ids, count in work]
        jobs = [job for job in started if job is not None]
        if jobs:
            self._masking.submit(self._run_fast, [*jobs])
        return jobs

    def _run_fast(self, jobs: list[MaskJob]) -> None:
        """Compute one row of each job at a time. Hand slow jobs over to the slow thread."""
        while jobs:
            jobs = [job for job in jobs if self._step(job)]

    def _step(self, job: MaskJob) -> bool:
        try:
            return job.step(may_take_long=False)
        except SlowMaskError:
            self._slow.submit(_run, job)
        except BaseException as error:  # llguidance's panics do not derive from Exception
            _fail(job, error)
        return False

    def compile(self, grammar: str, is_large: bool) -> Lexer:
        """Return a new lexer that has read nothing. Takes up to tenths of a second. Raises GrammarError."""
        from specpool.protocol.grammars import COMPILE_FUEL, LARGE_FUEL, compile_grammar  # needs an extra

        # A large lexer may have to read a whole text before its first mask.
        limits = self.limits
        large, small = (limits.max_states, LARGE_FUEL, LARGE_FUEL), (limits.small_states, COMPILE_FUEL, SMALL_FUEL)
        tokenizer = self._loaded().result()
        matcher = compile_grammar(tokenizer, grammar, *(large if is_large else small), limits.max_items)
        max_bytes = (LARGE_BYTES if is_large else SMALL_BYTES) + len(grammar) * CHARACTER_BYTES
        return Lexer(matcher, self._ends, max_bytes, is_large)

    def _is_compiled(self, grammar: str) -> bool:
        """Whether a grammar's lexer or error is kept."""
        return self.lexers.get(grammar) is not None or grammar in self._errors

    def _compilation(self, grammar: str) -> Future[None]:
        with self._lock:
            future = self._waiting.get(grammar)
            if future is None:
                self._loaded()
                future = self._waiting[grammar] = self._compiling.submit(self._compile_first, grammar)
            return future

    def _compile_first(self, grammar: str) -> None:
        """Compile a new or evicted grammar. Keep its lexer or its error."""
        from specpool.protocol.grammars import GrammarError

        try:
            try:
                lexer = self.compile(grammar, is_large=False)
            except GrammarError:  # it may need more states at the start
                lexer = self.compile(grammar, is_large=True)
            self.lexers.put(grammar, lexer)
        except BaseException as error:  # llguidance's panics do not derive from Exception
            self._errors[grammar] = str(error)[:MAX_ERROR_CHARACTERS]  # it may quote the grammar
            if len(self._errors) > MAX_ERRORS:
                self._errors.popitem(last=False)
        finally:
            with self._lock:  # it may end before `_compilation` has recorded it
                del self._waiting[grammar]

    def _loaded(self) -> Future[LLTokenizer]:
        """Return the tokenizer. The first call starts loading it."""
        if self._tokenizer is None:
            from specpool.protocol.grammars import load_grammar_tokenizer

            self._tokenizer = self._compiling.submit(load_grammar_tokenizer, self._files, self._vocab_size)
        return self._tokenizer


def settle(jobs: Sequence[MaskJob], seconds: float) -> None:
    """Wait up to `seconds` for all jobs, then give their sequences the masks computed so far."""
    deadline = time.monotonic() + seconds
    for job in jobs:
        job.ended.wait(max(0.0, deadline - time.monotonic()))
        job.settle()


def _run(job: MaskJob) -> None:
    try:
        job.run()
    except BaseException as error:  # llguidance's panics do not derive from Exception
        _fail(job, error)


def _fail(job: MaskJob, error: BaseException) -> None:
    log.error("mask computation failed: %r", error)
    job.fail(f"the grammar failed: {error}")


def _yield_to_others() -> None:
    """Give the calling thread a low priority."""
    if sys.platform == "linux":  # elsewhere, the id could name another process
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), SLOW_NICENESS)
