"""Child processes of a command, which never outlive it."""

import asyncio
import contextlib
import os
import signal
import socket
import sys
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from specpool.rpc.config.settings import ENV_PREFIX
from specpool.rpc.security.channel import Connector, SecurityOptions
from specpool.rpc.server.server import process_name

# Time between the end of the drain period and SIGKILL.
KILL_AFTER_SECONDS = 5.0
RESTART_SECONDS = 1.0
PROBE_SECONDS = 0.2
"""Pause between two health checks."""
# A process may answer slowly while it starts.
PROBE_TIMEOUT_SECONDS = 1.0
_UNREACHABLE = {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED}
# Iterations for which a waiting thread of torch spins: well below a millisecond.
SPIN_COUNT = "30000"


class ProcessFailedError(Exception):
    """A process could not start, or ended before it was serving. It has printed its own message."""


async def is_serving(channel: grpc.aio.Channel, service: str = "") -> bool:
    """Whether the server is reachable and reports SERVING for a health check name; "" stands for all services.

    Raises the AioRpcError of a server without this name, or without health checks.
    """
    request = health_pb2.HealthCheckRequest(service=service)
    try:
        response = await health_pb2_grpc.HealthStub(channel).Check(request, timeout=PROBE_TIMEOUT_SECONDS)
    except grpc.aio.AioRpcError as error:
        if error.code() in _UNREACHABLE:
            return False
        raise
    return bool(response.status == health_pb2.HealthCheckResponse.SERVING)


@dataclass
class Service:
    """One of the three processes."""

    name: str
    module: str
    arguments: list[str]
    address: str
    security: SecurityOptions = field(default_factory=SecurityOptions)
    """Options of connections to the process."""
    process: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        """Start the process. It logs to our stderr, and exits if we are killed."""
        self.process = await start_module(self.module, *self.arguments, "--parent-pid", str(os.getpid()))

    async def wait_serving(self) -> None:
        """Wait until the health check reports SERVING. ProcessFailedError if the process ends first."""
        async with Connector(self.address, **self.security).open() as channel:
            while True:
                assert self.process is not None
                if self.process.returncode is not None:
                    raise ProcessFailedError(f"the {self.name} ended with status {self.process.returncode}")
                # Another server on the port does not know this name. Ours will soon report that the port is in use.
                with contextlib.suppress(grpc.aio.AioRpcError):
                    if await is_serving(channel, process_name(self.process.pid)):
                        return
                await asyncio.sleep(PROBE_SECONDS)

    async def keep_running(self) -> None:
        """Restart the process whenever it ends; never return."""
        while True:
            assert self.process is not None
            status = await self.process.wait()
            print(f"specpool up: the {self.name} ended with status {status}; restarting it", file=sys.stderr)
            await asyncio.sleep(RESTART_SECONDS)
            await self.start()

    async def stop(self, drain_seconds: float) -> None:
        """Let the process drain, and kill it if that takes too long."""
        if self.process is not None:
            await end(self.process, drain_seconds + KILL_AFTER_SECONDS)


def require_torch() -> None:
    """ProcessFailedError if torch is not installed."""
    if find_spec("torch") is None:
        raise ProcessFailedError("needs torch: pip install 'specpool[worker]'")


def run_module(module: str) -> list[str]:
    """Command line of an installed module. It imports nothing from the current directory."""
    return [sys.executable, "-P", "-m", module]


async def start_module(module: str, *arguments: str, **options: Any) -> asyncio.subprocess.Process:
    """Start a module in its own session, so that terminal signals reach only us and we control the shutdown order."""
    command = [*run_module(module), *arguments]
    return await asyncio.create_subprocess_exec(*command, env=worker_environment(), start_new_session=True, **options)


async def end(process: asyncio.subprocess.Process, timeout_seconds: float) -> None:
    """Terminate the process; kill it after the timeout, or if we are cancelled."""
    if process.returncode is not None:
        return
    process.terminate()
    try:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(process.wait(), timeout_seconds)
    finally:
        await kill([process])


async def kill(processes: list[asyncio.subprocess.Process]) -> None:
    """Kill the processes that are still running, and their children."""
    running = [process for process in processes if process.returncode is None]
    for process in running:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    await asyncio.gather(*(process.wait() for process in running))


def worker_environment() -> dict[str, str]:
    """Environment of the processes: without our settings, and with threads that spin only briefly.

    Spinning threads take cores from the other worker, but waking a sleeping thread takes longer than many operations
    (docs/decisions.md).
    """
    inherited = {name: value for name, value in os.environ.items() if not name.upper().startswith(ENV_PREFIX)}
    return {"GOMP_SPINCOUNT": SPIN_COUNT, "HF_HUB_DISABLE_PROGRESS_BARS": "1", **inherited}


def free_port() -> int:
    """A port that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
