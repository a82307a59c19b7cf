"""The coordinator's link to one prompt process, and the check of a chat template's file in such a process."""

import asyncio
import contextlib
import marshal
import os
import signal
import subprocess
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import Sequence
from pathlib import Path

from coordinator.prompts.frames import HEADER, MAX_REASON_CHARACTERS, MIB, Allowance, Kind, frame

COMMAND = [sys.executable, "-P", "-m", "coordinator.prompts.process"]
# Wall-clock seconds allowed per second of processor time. A process that hangs without using any is killed after that.
PATIENCE = 10.0
# Time for a process to end after it has closed its pipe.
EXIT_SECONDS = 1.0
# The process inherits no other variables, and so neither settings nor secrets.
INHERITED = {"LD_LIBRARY_PATH", "PYTHONHOME", "TZ"}

MAX_FILE_BYTES = 2**20
# Processor time and wall-clock time to compile a template.
COMPILE_SECONDS, PATIENCE_SECONDS = 3.0, 60.0


class ProcessDiedError(Exception):
    """The process exited before it answered."""

    def __init__(self, status: int | None, stage: Allowance, is_rendered: bool) -> None:
        super().__init__(f"a prompt process ended with status {status}")
        self.is_rendered = is_rendered
        self.is_killed = status == -signal.SIGKILL
        """Whether somebody else killed it. Otherwise the request ended it."""
        is_slow = status == -signal.SIGPROF
        self.reason = f"takes more than {f'{stage.seconds:.3g} s' if is_slow else f'{stage.shown_memory}, or crashes'}"


class ProcessLink:
    """Starts a prompt process and sends it one request at a time."""

    def __init__(self, command: Sequence[str] = COMMAND, patience: float = PATIENCE) -> None:
        self._command, self._patience = command, patience
        self._process: Process | None = None
        self._is_usable = False
        self.loaded: bytes | None = None
        """The request that loaded its tokenizer."""
        self.has_grammars = False
        """Whether it can compile constraints."""

    @property
    def is_usable(self) -> bool:
        """Whether the process can answer another request."""
        process = self._process
        if not self._is_usable or process is None or process.stdout is None:
            return False
        # A process that has died closes its output before its status is known.
        return process.returncode is None and not process.stdout.at_eof()

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process is not None else None

    async def start(self) -> None:
        """Start the process, in place of an earlier one. Raises OSError."""
        await self.close()
        self.loaded, self.has_grammars = None, False
        self._process = await asyncio.create_subprocess_exec(
            *self._command, stdin=PIPE, stdout=PIPE, env=environment(), start_new_session=True, limit=MIB
        )
        self._is_usable = True

    async def ask(
        self, kind: Kind, body: bytes, stage: Allowance, max_reply: int, seconds: float = 0.0
    ) -> tuple[Kind, bytes]:
        """Send a request and return its reply. Raises ProcessDiedError.

        `stage`: what the first stage may take. `seconds`: processor time of a prompt. `max_reply`: maximum bytes of a
        reply. After an error, the process is not usable.
        """
        assert self._process is not None
        is_usable, self._is_usable = self._is_usable, False
        is_rendered = False
        try:
            self._write(frame(kind, body))
            while True:
                async with asyncio.timeout(self._patience * stage.seconds):
                    reply, content = await self._read(max_reply)
                if reply is Kind.BEGINS:
                    stage = Allowance.prompt(int.from_bytes(content[:8], "little"), seconds)
                    is_rendered = True
                elif reply is Kind.ENDS:
                    is_usable = False
                else:
                    self._is_usable = is_usable
                    return reply, content
        except (ValueError, TimeoutError):
            pass
        except (OSError, asyncio.IncompleteReadError):  # it ends, and its status says why
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(EXIT_SECONDS):
                    await self._process.wait()
        await self.close()
        raise ProcessDiedError(self._process.returncode, stage, is_rendered)

    def _write(self, message: bytes) -> None:
        assert self._process is not None
        assert self._process.stdin is not None
        self._process.stdin.write(message)

    async def _read(self, max_reply: int) -> tuple[Kind, bytes]:
        """Read a reply. Raises IncompleteReadError at the end, ValueError for a malformed one."""
        assert self._process is not None
        assert self._process.stdout is not None
        length, kind = HEADER.unpack(await self._process.stdout.readexactly(HEADER.size))
        if length > max_reply:
            raise ValueError(f"a reply of {length} bytes")
        return Kind(kind), await self._process.stdout.readexactly(length)

    async def close(self) -> None:
        self._is_usable = False
        if self._process is None or self._process.returncode is not None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._process.pid, signal.SIGKILL)  # asyncio's `kill` may lose the exit status of a dead process
        await self._process.wait()


def environment() -> dict[str, str]:
    """Return the environment of a prompt process."""
    inherited = {name: value for name, value in os.environ.items() if name in INHERITED}
    path = os.pathsep.join(folder for folder in sys.path if folder)
    # One arena and no threads: the limit on memory counts address space.
    return {**inherited, "PYTHONPATH": path, "MALLOC_ARENA_MAX": "1", "TOKENIZERS_PARALLELISM": "false"}


def read_template(path: Path) -> str:
    """Return the template of a file. Raises ValueError if it cannot be read."""
    if not path.is_file():
        raise ValueError(f"no such file: {path}")
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise ValueError(f"{path} has more than {MAX_FILE_BYTES} bytes")
        source = path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise ValueError(f"{path} is not UTF-8") from None
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}") from None
    if not source.strip():
        raise ValueError(f"{path} is empty")
    return source


def check_template(path: Path) -> None:
    """Raise ValueError if the template of a file cannot be read or does not compile. Takes a fraction of a second."""
    request = frame(Kind.TEMPLATE, marshal.dumps((read_template(path), COMPILE_SECONDS)))
    try:
        done = subprocess.run(
            COMMAND, input=request, stdout=subprocess.PIPE, env=environment(), timeout=PATIENCE_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ValueError(f"{path}: cannot start a prompt process: {error}") from None
    header, reason = done.stdout[: HEADER.size], done.stdout[HEADER.size :]
    if len(header) < HEADER.size:
        raise ValueError(f"{path}: the chat template takes too much time or memory to compile")
    if HEADER.unpack(header)[1] != Kind.DONE:
        raise ValueError(f"{path}: {reason.decode(errors='replace')[:MAX_REASON_CHARACTERS]}")
