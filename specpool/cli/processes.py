"""Processes that a command starts, and that never outlive it."""

import asyncio
import contextlib
import os
import signal
import sys
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any

import grpc

from specpool.cli.health import PROBE_SECONDS, is_serving
from specpool.rpc.config.settings import ENV_PREFIX
from specpool.rpc.security.channel import Connector, SecurityOptions
from specpool.rpc.server.server import process_name

# The time that a process gets, after the drain that it was promised, before it is killed.
KILL_AFTER_SECONDS = 5.0
RESTART_SECONDS = 1.0
# Turns of the loop in which a waiting thread spins: well below a millisecond.
SPIN_COUNT = "30000"


class ProcessFailedError(Exception):
    """A process cannot be started, or ended before it served, having printed its own message."""


@dataclass
class Service:
    """One of the three processes, started again if it ends after it once served."""

    name: str
    module: str
    arguments: list[str]
    address: str
    security: SecurityOptions = field(default_factory=SecurityOptions)
    """Options for connections to the process."""
    process: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        """Starts the process; its log goes to our stderr. It ends by itself if we are killed."""
        self.process = await start_module(self.module, *self.arguments, "--parent-pid", str(os.getpid()))

    async def wait_serving(self) -> None:
        """Returns when health says SERVING. ProcessFailedError if the process ends before."""
        async with Connector(self.address, **self.security).open() as channel:
            while True:
                assert self.process is not None
                if self.process.returncode is not None:
                    raise ProcessFailedError(f"the {self.name} ended with status {self.process.returncode}")
                # Another server on the port must not be mistaken for ours, which is about to say that it is taken.
                with contextlib.suppress(grpc.aio.AioRpcError):
                    if await is_serving(channel, process_name(self.process.pid)):
                        return
                await asyncio.sleep(PROBE_SECONDS)

    async def keep_running(self) -> None:
        """Restarts the process whenever it ends; never returns."""
        while True:
            assert self.process is not None
            status = await self.process.wait()
            print(f"specpool up: the {self.name} ended with status {status}; starting it again", file=sys.stderr)
            await asyncio.sleep(RESTART_SECONDS)
            await self.start()

    async def stop(self, drain_seconds: float) -> None:
        """Lets the process drain, and kills it if that takes too long."""
        if self.process is not None:
            await end(self.process, drain_seconds + KILL_AFTER_SECONDS)


def require_torch() -> None:
    """ProcessFailedError if torch, which clients need not have, is not installed."""
    if find_spec("torch") is None:
        raise ProcessFailedError("needs torch: pip install 'specpool[worker]'")


def run_module(module: str) -> list[str]:
    """The command that runs an installed module, whatever modules of its name the current directory has."""
    return [sys.executable, "-P", "-m", module]


async def start_module(module: str, *arguments: str, **options: Any) -> asyncio.subprocess.Process:
    """Starts a module in a session of its own: a terminal's signals reach only us, and we end it in order."""
    command = [*run_module(module), *arguments]
    return await asyncio.create_subprocess_exec(*command, env=worker_environment(), start_new_session=True, **options)


async def end(process: asyncio.subprocess.Process, patience_seconds: float) -> None:
    """Asks the process to end, and kills it if that takes too long or if we are cancelled meanwhile."""
    if process.returncode is not None:
        return
    process.terminate()
    try:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(process.wait(), patience_seconds)
    finally:
        await kill([process])


async def kill(processes: list[asyncio.subprocess.Process]) -> None:
    """Kills the processes that still run, and their children."""
    running = [process for process in processes if process.returncode is None]
    for process in running:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    await asyncio.gather(*(process.wait() for process in running))


def worker_environment() -> dict[str, str]:
    """The environment of the processes: none of our settings, and threads that spin only briefly between operations.

    Target and draft take turns. Threads that spin while the other model runs take cores from it, and waking a thread
    that sleeps takes longer than many operations do (README, "Decisions").
    """
    inherited = {name: value for name, value in os.environ.items() if not name.upper().startswith(ENV_PREFIX)}
    return {"GOMP_SPINCOUNT": SPIN_COUNT, "HF_HUB_DISABLE_PROGRESS_BARS": "1", **inherited}
