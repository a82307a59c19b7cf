"""A prompt process: renders chats, tokenizes text and compiles constraints, within limits on memory and processor time.

Tokenizers, chat templates and constraints come from strangers. They run here, where they can harm only their own
request. The coordinator starts this module as `python -m coordinator.prompts.process`; it exits when its standard input
closes.
"""

import json
import marshal
import os
import resource
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import partial
from typing import Any, BinaryIO

from coordinator.prompts.frames import HEADER, MAX_REASON_CHARACTERS, Allowance, Kind, frame, pack_ids
from coordinator.prompts.templates import Chat, ChatTemplate
from coordinator.prompts.tokenizer import TargetTokenizer, TooManyTokensError, WorkLimits
from specpool.protocol.tokenizer import TokenizerFiles

PAGE_BYTES = resource.getpagesize()
# Memory that the process may keep after a request, on top of the tokenizer's. Beyond it, the process is replaced.
MAX_KEPT = 512 * 2**20


Limit = Callable[[Allowance, str], AbstractContextManager[None]]


class OutOfMemoryError(ValueError):
    """The work takes more memory than it may."""


class PromptProcess:
    """Answers requests one at a time."""

    def __init__(self, replies: BinaryIO, limited: Limit | None = None) -> None:
        """`limited` runs work within an allowance; by default, the process that exceeds it ends."""
        self._replies = replies
        self._limited = limited or _limited
        self._tokenizer: TargetTokenizer | None = None
        self._vocab_size = 0
        self._compile_constraint: Callable[[str, str, bool], str] | None = None
        self._memory_at_start = _memory()
        self.ends = False
        """Whether the process has kept too much memory and must exit."""

    def answer(self, kind: Kind, request: Any) -> None:
        """Handle a request and send its reply."""
        handlers: dict[Kind, Callable[..., tuple[Kind, bytes]]] = {
            Kind.LOAD: self._load,
            Kind.TEXT: self._tokenize_text,
            Kind.CHAT: self._tokenize_chat,
            Kind.TEMPLATE: self._compile,
            Kind.GRAMMARS: self._load_grammars,
            Kind.CONSTRAINT: self._compile_grammar,
        }
        try:
            kind, body = handlers[kind](*request)
        except TooManyTokensError:
            kind, body = Kind.TOO_LONG, b""
        except ValueError as error:
            kind = Kind.EXHAUSTED if isinstance(error, OutOfMemoryError) else Kind.REFUSED
            body = str(error)[:MAX_REASON_CHARACTERS].encode(errors="replace")
        if _memory() > self._memory_at_start + MAX_KEPT:
            self.ends = True
            self._send(Kind.ENDS, b"")
        self._send(kind, body)

    def _load(self, files: tuple[Any, ...], vocab_size: int, reasoning_tags: str) -> tuple[Kind, bytes]:
        with self._limited(Allowance.load(len(files[0])), "the tokenizer"):
            self._tokenizer, self._vocab_size = TargetTokenizer(TokenizerFiles(*files), vocab_size), vocab_size
            description = json.dumps(self._tokenizer.describe(reasoning_tags)).encode()
        self._memory_at_start = _memory()
        return Kind.DONE, description

    def _compile(self, source: str, seconds: float) -> tuple[Kind, bytes]:
        with self._limited(Allowance.prompt(len(source), seconds), "the chat template"):
            ChatTemplate(source, {})
        return Kind.DONE, b""

    def _load_grammars(self) -> tuple[Kind, bytes]:
        from coordinator.prompts.constraints import compile_constraint, load_grammar_tokenizer  # an extra

        assert self._tokenizer is not None
        files = self._tokenizer.files
        with self._limited(Allowance.load(len(files.tokenizer_json)), "the tokenizer"):
            tokenizer = load_grammar_tokenizer(files, self._vocab_size)
        self._compile_constraint = partial(compile_constraint, tokenizer)
        self._memory_at_start = _memory()
        return Kind.DONE, b""

    def _compile_grammar(self, kind: str, text: str, json_whitespace: bool, seconds: float) -> tuple[Kind, bytes]:
        assert self._compile_constraint is not None
        with self._limited(Allowance.constraint(seconds), "compiling it"):
            return Kind.DONE, self._compile_constraint(kind, text, json_whitespace).encode()

    def _tokenize_text(
        self, text: str, max_tokens: int, max_characters: int, seconds: float, add_special_tokens: bool
    ) -> tuple[Kind, bytes]:
        assert self._tokenizer is not None
        limits = WorkLimits(max_tokens, max_characters)
        with self._limited(Allowance.prompt(len(text.encode()), seconds), "the tokenizer"):
            ids = self._tokenizer.encode_text(text, limits, add_special_tokens=add_special_tokens)
            return _token_ids(ids, max_tokens)

    def _tokenize_chat(
        self, chat: tuple[Any, ...], size: int, max_tokens: int, max_characters: int, seconds: float
    ) -> tuple[Kind, bytes]:
        assert self._tokenizer is not None
        limits = WorkLimits(max_tokens, max_characters)
        with self._limited(Allowance.prompt(size, seconds), "the model's chat template"):
            text = self._tokenizer.render(Chat(*chat), limits)
            rendered = len(text.encode(errors="replace"))
        self._send(Kind.BEGINS, rendered.to_bytes(8, "little"))
        with self._limited(Allowance.prompt(rendered, seconds), "the tokenizer"):
            return _token_ids(self._tokenizer.encode_rendered(text, limits), max_tokens)

    def _send(self, kind: Kind, body: bytes) -> None:
        self._replies.write(frame(kind, body))
        self._replies.flush()


def _token_ids(ids: list[int], max_tokens: int) -> tuple[Kind, bytes]:
    if len(ids) > max_tokens:
        return Kind.TOO_LONG, len(ids).to_bytes(8, "little")
    return Kind.TOKEN_IDS, pack_ids(ids)


@contextmanager
def _limited(allowance: Allowance, worker: str) -> Iterator[None]:
    """Limit memory and processor time. Raises OutOfMemoryError.

    A signal ends the process when its processor time is up, and so does a failed allocation of a Rust library.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    _limit_memory(_memory() + allowance.memory, hard)
    signal.setitimer(signal.ITIMER_PROF, allowance.seconds)
    try:
        yield
    except MemoryError:
        raise OutOfMemoryError(f"{worker} takes more than {allowance.shown_memory}") from None
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        _limit_memory(hard, hard)


def _memory() -> int:
    """Return the size of the address space, 0 where it is unknown."""
    try:
        with open("/proc/self/statm", "rb") as file:
            return int(file.read().split()[0]) * PAGE_BYTES
    except OSError:
        return 0


def _limit_memory(soft: int, hard: int) -> None:
    with suppress(ValueError, OSError):  # macOS has no such limit, and a lower one may be set already
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def _isolate() -> BinaryIO:
    """Ignore the terminal's signals, forbid writing files, and return the pipe for replies."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    for limit in (resource.RLIMIT_CORE, resource.RLIMIT_FSIZE):
        resource.setrlimit(limit, (0, 0))
    replies = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    # Libraries that fail may print prompts.
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.dup2(nowhere, sys.stderr.fileno())
    return replies


def main() -> None:
    """Answer requests until the coordinator closes the pipe or exits."""
    process = PromptProcess(_isolate())
    requests = sys.stdin.buffer
    with suppress(BrokenPipeError):
        while not process.ends and len(header := requests.read(HEADER.size)) == HEADER.size:
            length, kind = HEADER.unpack(header)
            process.answer(Kind(kind), marshal.loads(requests.read(length)))


if __name__ == "__main__":
    main()
