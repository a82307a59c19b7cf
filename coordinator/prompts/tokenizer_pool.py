"""The tokenizer pool: prompt processes that are replaced when they exit. Large prompts do not delay small ones."""

import asyncio
import errno
import logging
import marshal
import os
from collections.abc import Callable
from dataclasses import astuple, dataclass
from typing import Any

from coordinator.prompts.chat_formats import AUTO
from coordinator.prompts.description import TokenizerDescription, TokenizerError, read_description
from coordinator.prompts.frames import MAX_REASON_CHARACTERS, MIB, Allowance, Kind, unpack_ids
from coordinator.prompts.process_link import ProcessDiedError, ProcessLink
from coordinator.prompts.turns import Turn, Turns
from specpool.protocol.errors import UnavailableError, UnimplementedError
from specpool.protocol.tokenizer import TokenizerFiles

PROCESSES = 2
# Larger prompts use only one of the processes.
LARGE_BYTES = 16_384
MAX_DESCRIPTION_BYTES = 64 * MIB
MAX_REASON_BYTES = 4 * MAX_REASON_CHARACTERS
MAX_GRAMMAR_BYTES = MIB

log = logging.getLogger(__name__)

Check = Callable[[], None]


class PromptError(ValueError):
    """The prompt cannot be rendered or tokenized."""


class LimitError(PromptError):
    """The work takes too much time or memory. It may succeed later, when the machine is less busy."""


class TooLongError(PromptError):
    """The prompt has too many tokens."""

    def __init__(self, tokens: int | None) -> None:
        """`tokens`: None if the process stopped counting at the limit."""
        super().__init__("has too many tokens" if tokens is None else f"has {tokens} tokens")
        self.tokens = tokens


@dataclass(frozen=True)
class TimeLimits:
    seconds: float = 3.0
    """Processor time to render a chat or to tokenize a short text."""
    constraint_seconds: float = 1.0
    """Processor time to compile a constraint."""
    restart_seconds: float = 1.0
    """Pause before another attempt to start a process."""


@dataclass(frozen=True)
class _Request:
    kind: Kind
    body: bytes
    first_stage: Allowance
    max_reply: int
    seconds: float = 0.0
    """Processor time of a later stage."""
    first_worker: str = "the tokenizer"
    """Cause to report if the first stage ends the process."""


@dataclass(frozen=True)
class Prompt:
    client: str
    size: int
    """Bytes of the prompt."""
    content: Callable[[], Any]
    """Returns a text, or the fields of a `coordinator.prompts.templates.Chat`. May raise."""
    is_chat: bool
    max_tokens: int
    max_characters: int
    """Maximum output of the chat template."""
    add_special_tokens: bool = True
    """Whether to add the model's special tokens around a text."""

    def request(self, times: TimeLimits) -> _Request:
        """Return the request to a process. Raises the errors of `content`."""
        limits = (self.max_tokens, self.max_characters, times.seconds)
        stage, max_reply = Allowance.prompt(self.size, times.seconds), 4 * self.max_tokens + MAX_REASON_BYTES
        if self.is_chat:
            body, worker = marshal.dumps((self.content(), self.size, *limits)), "the model's chat template"
            return _Request(Kind.CHAT, body, stage, max_reply, times.seconds, worker)
        body = marshal.dumps((self.content(), *limits, self.add_special_tokens))
        return _Request(Kind.TEXT, body, stage, max_reply, times.seconds)


@dataclass(frozen=True)
class Constraint:
    kind: str
    """Name of its field in `SamplingParams`."""
    text: str
    """The field's text. For `choice`, a JSON list; for `json_object`, a schema."""
    json_whitespace: bool = False
    """Whether JSON may contain optional whitespace."""

    def request(self, times: TimeLimits) -> _Request:
        """Return the request to a process."""
        body = marshal.dumps((self.kind, self.text, self.json_whitespace, times.constraint_seconds))
        stage = Allowance.constraint(times.constraint_seconds)
        return _Request(Kind.CONSTRAINT, body, stage, MAX_GRAMMAR_BYTES, first_worker="compiling it")


class TokenizerPool:
    """Tokenizes prompts and compiles constraints in prompt processes."""

    def __init__(self, max_waiting: int, new_link: Callable[[], ProcessLink] = ProcessLink) -> None:
        """`max_waiting`: maximum number of waiting prompts of a client; others are refused."""
        self.times = TimeLimits()
        self._turns: Turns[ProcessLink] = Turns(max_waiting)
        self._links = [new_link() for _ in range(PROCESSES)]
        self._load: bytes | None = None
        """The request that loads the tokenizer."""
        self._load_allowance = Allowance.load(0)
        self._is_started = self._is_closed = False
        self._tasks: set[asyncio.Task[Any]] = set()

    @property
    def pids(self) -> list[int]:
        return [link.pid for link in self._links if link.pid is not None]

    def start(self) -> None:
        """Start the processes in the background, unless they have been started."""
        if not self._is_started:
            self._is_started = True
            for link in self._links:
                self._in_background(self._revive(link))

    async def load(self, files: TokenizerFiles, vocab_size: int, reasoning_tags: str = AUTO) -> TokenizerDescription:
        """Load a tokenizer into all processes. `reasoning_tags`: see `chat_formats.find_tags`.

        Raises TokenizerError if the tokenizer is unusable, and LimitError for failures that a retry may fix.
        """
        self.start()
        request = marshal.dumps((astuple(files), vocab_size, reasoning_tags))
        allowance = Allowance.load(len(files.tokenizer_json))
        turn, link = await self._turns.take("")
        try:
            if not link.is_usable:
                await link.start()
            kind, body = await link.ask(Kind.LOAD, request, allowance, MAX_DESCRIPTION_BYTES)
            if kind is not Kind.DONE:
                raise (LimitError if kind is Kind.EXHAUSTED else TokenizerError)(_text(body))
            description = await asyncio.to_thread(read_description, body, files)
        except ProcessDiedError as error:
            raise LimitError(f"loading it {error.reason}") from None
        except OSError as error:
            raise LimitError(f"cannot start a prompt process: {error.strerror}") from None
        else:
            link.loaded, self._load, self._load_allowance = request, request, allowance
            for other in self._turns.take_free():
                self._in_background(self._revive(other))
        finally:
            self._release(turn, link)
        return description

    async def encode(self, prompt: Prompt, before: Check = lambda: None) -> list[int]:
        """Return the token ids of a prompt. `before` runs when a process is free, and may raise.

        Raises PromptError, QueueFullError, UnavailableError, and the errors of the prompt and of `before`.
        """
        return _token_ids(*await self._serve(prompt.client, prompt.size > LARGE_BYTES, before, prompt.request))

    async def compile(self, client: str, constraint: Constraint, before: Check = lambda: None) -> str:
        """Return the grammar of a client's constraint. `before`: see `encode`.

        Raises PromptError, QueueFullError, UnavailableError, UnimplementedError, and the errors of `before`.
        """
        is_large = len(constraint.text) > LARGE_BYTES
        kind, reply = await self._serve(client, is_large, before, constraint.request)
        if kind is not Kind.DONE:
            raise (LimitError if kind is Kind.EXHAUSTED else PromptError)(_text(reply))
        return reply.decode()

    async def close(self) -> None:
        self._is_closed = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.gather(*(link.close() for link in self._links))

    async def _serve(
        self, client: str, is_large: bool, before: Check, make: Callable[[TimeLimits], _Request]
    ) -> tuple[Kind, bytes]:
        """Wait for a process, and return its reply to a request. `make` returns the request."""
        turn, link = await self._turns.take(client, is_large)

        async def answer() -> tuple[Kind, bytes]:
            try:
                before()
                return await self._ask(
                    turn, link, await asyncio.to_thread(make, self.times) if is_large else make(self.times)
                )
            finally:
                self._release(turn, link)

        # An abandoned request keeps its process busy, but only for a limited time.
        return await asyncio.shield(self._in_background(answer()))

    async def _ask(self, turn: Turn[ProcessLink], link: ProcessLink, request: _Request) -> tuple[Kind, bytes]:
        """Ask a process, and retry once if somebody else killed it.

        Raises LimitError, UnavailableError, UnimplementedError.
        """
        for _ in range(2):
            try:
                await self._prepare(link)
                if request.kind is Kind.CONSTRAINT and not link.has_grammars:
                    await self._load_grammars(link)
                    self._turns.restart(turn)
                return await link.ask(
                    request.kind, request.body, request.first_stage, request.max_reply, request.seconds
                )
            except OSError as error:
                raise UnavailableError(f"cannot start a prompt process: {error.strerror}") from None
            except ProcessDiedError as error:
                if not error.is_killed:
                    turn.is_slow = True
                    worker = "the tokenizer" if error.is_rendered else request.first_worker
                    raise LimitError(f"{worker} {error.reason}") from None
                log.warning("a prompt process was killed; starting another one")
        raise UnavailableError("the prompt process was killed; try again")

    async def _prepare(self, link: ProcessLink) -> None:
        """Start a process if it is not running, and load the tokenizer. Raises OSError, ProcessDiedError."""
        if not link.is_usable:
            await link.start()
        if link.loaded is not self._load:
            assert self._load is not None
            kind, _ = await link.ask(Kind.LOAD, self._load, self._load_allowance, MAX_DESCRIPTION_BYTES)
            if kind is not Kind.DONE:  # it has loaded before
                await link.close()
                raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))
            link.loaded = self._load

    async def _load_grammars(self, link: ProcessLink) -> None:
        """Prepare a process for constraints. Raises ProcessDiedError, UnimplementedError."""
        kind, reply = await link.ask(Kind.GRAMMARS, marshal.dumps(()), self._load_allowance, MAX_REASON_BYTES)
        if kind is not Kind.DONE:
            raise UnimplementedError(f"the model's tokenizer does not support constraints: {_text(reply)}")
        link.has_grammars = True

    async def _revive(self, link: ProcessLink) -> None:
        """Prepare a process, retrying until it succeeds, and offer it to the next prompts."""
        while True:
            try:
                await self._prepare(link)
                return self._turns.add(link)
            except (OSError, ProcessDiedError) as error:
                log.warning("cannot start a prompt process: %s", error)
                await asyncio.sleep(self.times.restart_seconds)

    def _release(self, turn: Turn[ProcessLink], link: ProcessLink) -> None:
        """End a turn. A process that exited becomes free once it has been replaced."""
        self._turns.end(turn)
        if link.is_usable:
            self._turns.add(link)
        elif not self._is_closed:
            self._in_background(self._revive(link))

    def _in_background(self, work: Any) -> asyncio.Task[Any]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


def _token_ids(kind: Kind, body: bytes) -> list[int]:
    """Read the untrusted reply to a prompt. Raises PromptError."""
    if kind is Kind.TOKEN_IDS and len(body) % 4 == 0:
        return unpack_ids(body)
    if kind is Kind.TOO_LONG:
        raise TooLongError(int.from_bytes(body[:8], "little") if body else None)
    raise PromptError(_text(body))


def _text(body: bytes) -> str:
    return body.decode(errors="replace")[:MAX_REASON_CHARACTERS]
