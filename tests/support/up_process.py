"""`specpool up` as a process."""

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

from serving import PATIENCE_SECONDS

LIMIT_SECONDS = 280
"""Before the suite's own limit of a test, which would not end the processes."""

Pair = tuple[Path, Path]


@asynccontextmanager
async def started(
    *arguments: str, sighup: signal.Handlers = signal.SIG_DFL, **environment: str
) -> AsyncIterator[asyncio.subprocess.Process]:
    """Run `specpool ...` with this inherited SIGHUP handler; kill it at the end."""
    before = signal.signal(signal.SIGHUP, sighup)
    try:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "specpool.cli.main", *arguments, env={**os.environ, **environment},
            stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
        )  # fmt: skip
    finally:
        signal.signal(signal.SIGHUP, before)
    try:
        async with asyncio.timeout(LIMIT_SECONDS):
            yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


def pair_flags(pair: Pair, *more: str) -> list[str]:
    sizes = ["--max-model-len", "256", "--threads", "1", "--log-level", "error"]
    return ["--port", "0", "--target", str(pair[0]), "--draft", str(pair[1]), *sizes, *more]


def up_command(pair: Pair, *more: str) -> list[str]:
    """Return the command without the HTTP server, whose default port would be the same in all tests."""
    return ["up", "--http-port", "0", *pair_flags(pair, *more)]


def plain_up(pair: Pair, *more: str) -> list[str]:
    """`up` without a draft worker, which starts faster."""
    return up_command(pair, "--draft", "none", "--drain-seconds", "1", *more)


async def address_of(process: asyncio.subprocess.Process) -> str:
    """The address that `specpool up` prints once it is serving."""
    assert process.stdout is not None
    line = (await process.stdout.readline()).decode()
    assert line.startswith("specpool is serving at "), line
    return line.split()[-1]


async def api_of(process: asyncio.subprocess.Process) -> str:
    """The base URL of OpenAI's API, which `specpool up` prints after its address."""
    assert process.stdout is not None
    line = (await process.stdout.readline()).decode()
    assert line.startswith("OpenAI's API is at "), line
    return line.split()[-1]


def children_of(pid: int) -> dict[int, str]:
    """Command lines of the running children of a process, by pid."""
    children = {}
    for status in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has exited
            state, parent = status.read_text().rpartition(")")[2].split()[:2]
            if int(parent) == pid and state != "Z":
                children[int(status.parent.name)] = (status.parent / "cmdline").read_text()
    return children


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(PATIENCE_SECONDS):
        while not condition():  # noqa: ASYNC110 - the state of other processes
            await asyncio.sleep(0.05)


async def end_all(process: asyncio.subprocess.Process, number: signal.Signals, status: int, children: int = 2) -> str:
    """Assert that this signal ends the process with this status, and ends its children; return its stderr."""
    pids = children_of(process.pid)
    assert len(pids) == children
    process.send_signal(number)
    _, err = await process.communicate()
    assert process.returncode == status
    assert b"Traceback" not in err
    await until(lambda: not any(map(is_running, pids)))
    return err.decode()
