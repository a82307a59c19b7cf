"""Child processes of a command, which never outlive it."""

import asyncio
import contextlib
import json
import logging
import os
import re
import signal
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from threading import Thread
from typing import Any

from specpool.cli.probes import CONNECT_SECONDS, Checks, GrpcProbe, HttpProbe
from specpool.environment.extras import explain_missing
from specpool.environment.process import python_path
from specpool.rpc.config.inputs import ENV_PREFIX
from specpool.rpc.security.channel import SecurityOptions

log = logging.getLogger(__name__)

STDERR = 2
LAST_LINES_SECONDS = 1.0
"""Time to copy the last lines of a process that has ended. Its own children may keep the log open."""
# The beginning of an event in the log, or of a line that ends a program.
_FLAG = re.compile(r"--[a-z][a-z-]*")
_PREFIX = re.compile(r"\S+ [A-Z]+ (\S+ )?\S+: |specpool-[a-z-]+: ")


WRONG_SETTINGS = 2
"""Exit status of a process with invalid settings."""
# Time between the end of the drain period and SIGKILL.
KILL_AFTER_SECONDS = 5.0
RESTART_SECONDS = 1.0
PROBE_SECONDS = 0.2
"""Pause between two health checks."""
# A process that has served counts as stopped after this many consecutive unanswered health checks.
MAX_UNANSWERED, LIVENESS_SECONDS, LIVENESS_TIMEOUT_SECONDS = 2, 1.0, 5.0
# Iterations for which a waiting thread of torch spins: well below a millisecond.
SPIN_COUNT = "30000"


class ChildLog:
    """Copies lines on a separate thread, so that a slow reader of stderr blocks nothing else."""

    def __init__(self) -> None:
        self._reading, self.writing = os.pipe()
        self._last = ""
        self._thread = Thread(target=self._copy, name="child log", daemon=True)

    def follow(self) -> None:
        """Begin to copy. Closes our end of `writing`, which the child has inherited."""
        os.close(self.writing)
        self._thread.start()

    def ending(self, status: int) -> str:
        """Return why the process has ended, in one line: its last line, unless a signal killed it."""
        self._thread.join(LAST_LINES_SECONDS)
        if status < 0:
            hint = "; is there enough memory?" if -status == signal.SIGKILL else ""
            return f"killed by {signal.Signals(-status).name}{hint}"
        return self._last if status and self._last else f"ended with status {status}"

    def _copy(self) -> None:
        with open(self._reading, "rb") as lines:
            for line in lines:
                self._last = _message(line) or self._last
                with contextlib.suppress(OSError):  # stderr is closed
                    os.write(STDERR, line)


def _message(line: bytes) -> str:
    """Return the message of a log line, in either format."""
    text = line.decode(errors="replace").strip()
    with contextlib.suppress(ValueError, LookupError, TypeError):
        text = str(json.loads(text)["message"])
    return _PREFIX.sub("", text, count=1)


class ProcessFailedError(Exception):
    """The processes cannot start, or one ended before it was serving. `status`: the exit status of the command."""

    def __init__(self, reason: str, status: int = 1) -> None:
        super().__init__(reason)
        self.status = status


@dataclass
class Service:
    name: str
    module: str
    arguments: list[str]
    address: str
    security: SecurityOptions = field(default_factory=SecurityOptions)
    """Options of connections to the process."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """The settings from `arguments` that can be checked before the start."""
    probe: type[GrpcProbe | HttpProbe] = GrpcProbe
    """Checks the process at `address`, with `security`."""
    flags: Mapping[str, str] = field(default_factory=dict)
    """Flags of this command, such as "--target-kv-memory", by the process's own. Messages name the former."""
    starts_last: bool = False
    """Whether the process starts once the others serve, and reuses their measurements."""
    restart_seconds: float = RESTART_SECONDS
    liveness_seconds: float = LIVENESS_SECONDS
    liveness_timeout_seconds: float = LIVENESS_TIMEOUT_SECONDS
    process: asyncio.subprocess.Process | None = None
    has_served: bool = field(default=False, init=False)
    """Whether `wait_serving` has seen the process serve."""
    log: ChildLog = field(init=False)

    async def start(self) -> None:
        """Start the process. It logs to our stderr, and exits if we are killed."""
        arguments = [*self.arguments, "--parent-pid", str(os.getpid())]
        self.log, self.has_served = ChildLog(), False
        try:
            self.process = await start_module(self.module, *arguments, stderr=self.log.writing)
        finally:
            self.log.follow()

    async def wait_serving(self) -> None:
        """Wait until the process serves. ProcessFailedError if it ends first."""
        async with self.probe(self.address, self.security).open() as checks:
            while True:
                assert self.process is not None
                if (status := self.process.returncode) is not None:
                    ending = await asyncio.to_thread(self.log.ending, status)
                    reason = _FLAG.sub(lambda flag: self.flags.get(flag[0], flag[0]), ending)
                    raise ProcessFailedError(
                        f"{self.name}: {reason}", WRONG_SETTINGS if status == WRONG_SETTINGS else 1
                    )
                if await checks.is_serving(self.process.pid):
                    self.has_served = True
                    return
                await asyncio.sleep(PROBE_SECONDS)

    async def keep_running(self) -> None:
        """Restart the process whenever it exits, and kill it if it stops answering. Never returns."""
        while True:
            assert self.process is not None
            watching = asyncio.create_task(self._kill_if_stopped(self.process))
            try:
                status = await self.process.wait()
            finally:
                watching.cancel()
                await asyncio.wait([watching])
            ending = await asyncio.to_thread(self.log.ending, status)
            log.warning("%s: %s; restarting it", self.name, ending)
            await asyncio.sleep(self.restart_seconds)
            await self.start()

    async def _kill_if_stopped(self, process: asyncio.subprocess.Process) -> None:
        """Kill a process that has served if it misses several health checks in a row. Startup may take any time."""
        if not self.has_served:
            with contextlib.suppress(ProcessFailedError):  # it has ended
                await self.wait_serving()
        unanswered = 0
        async with self.probe(self.address, self.security).open(CONNECT_SECONDS) as checks:
            while unanswered < MAX_UNANSWERED:
                await asyncio.sleep(self.liveness_seconds)
                unanswered = 0 if await self.answers(checks) else unanswered + 1
        log.warning("%s has not answered %d health checks; killing it", self.name, unanswered)
        await kill([process])

    async def answers(self, checks: Checks) -> bool:
        """Return whether a health check completes in time, with any status."""
        return await checks.answers(self.liveness_timeout_seconds)

    async def stop(self, drain_seconds: float) -> None:
        """Let the process drain, and kill it if that takes too long."""
        if self.process is not None:
            await end(self.process, drain_seconds + KILL_AFTER_SECONDS)


def arguments_of(settings: Mapping[str, Any]) -> list[str]:
    """Format command-line arguments; None and () keep the process's default."""
    arguments = []
    for name, value in settings.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            arguments.append(f"--{flag}" if value else f"--no-{flag}")
        elif value not in (None, ()):
            arguments += [f"--{flag}", ",".join(value) if isinstance(value, tuple) else str(value)]
    return arguments


def require_torch() -> None:
    """Raise ProcessFailedError if torch, or another package that a worker needs, is not installed."""
    if (problem := explain_missing("worker")) is not None:
        raise ProcessFailedError(problem)


def run_module(module: str) -> list[str]:
    """Return the command line of a module of Specpool, which imports nothing from the current directory."""
    return [sys.executable, "-P", "-m", module]


async def start_module(module: str, *arguments: str, **options: Any) -> asyncio.subprocess.Process:
    """Start a module in its own session, so that terminal signals reach only us and we control the shutdown order."""
    command = [*run_module(module), *arguments]
    return await asyncio.create_subprocess_exec(*command, env=worker_environment(), start_new_session=True, **options)


async def end(process: asyncio.subprocess.Process, timeout_seconds: float) -> None:
    """Terminate the process; kill it after the timeout, or if we are cancelled. Then kill its remaining children."""
    if process.returncode is not None:
        return
    process.terminate()
    try:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_seconds):
                await process.wait()
    finally:
        # A worker that is stopped while it loads cannot stop a download.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()


async def kill(processes: list[asyncio.subprocess.Process]) -> None:
    """Kill the processes that are still running, and their children."""
    running = [process for process in processes if process.returncode is None]
    for process in running:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    await asyncio.gather(*(process.wait() for process in running))


def worker_environment() -> dict[str, str]:
    """Return the environment of the processes: without our settings, and with threads that spin only briefly.

    Spinning threads take cores from the other worker, but waking a sleeping thread takes longer than many operations
    (docs/decisions.md).
    """
    inherited = {name: value for name, value in os.environ.items() if not name.upper().startswith(ENV_PREFIX)}
    defaults = {"GOMP_SPINCOUNT": SPIN_COUNT, "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
    return {**defaults, **inherited, **python_path(inherited)}
