"""Runs the edge of `deploy/edge` with a real HAProxy."""

import asyncio
import shutil
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from serving import free_address

from specpool.rpc.security.channel import Connector

CONFIGURATION = Path(__file__).parents[2] / "deploy/edge/haproxy.cfg"
FOLDERS = "/usr/sbin:/usr/bin:/usr/local/sbin:/usr/local/bin"


def haproxy() -> str:
    """Return the path of HAProxy. Skip the test without it."""
    return shutil.which("haproxy", path=FOLDERS) or pytest.skip("HAProxy is not installed")


def command(*options: str) -> list[str]:
    return [haproxy(), *options, "-db", "-f", str(CONFIGURATION)]


def environment(**variables: str) -> dict[str, str]:
    """Return the environment of an edge, from EDGE_* variables in lower case without the prefix."""
    return {f"EDGE_{name.upper()}": value for name, value in variables.items()}


def checked(**variables: str) -> subprocess.CompletedProcess[str]:
    """Check the configuration with these variables."""
    return subprocess.run(command("-c"), env=environment(**variables), capture_output=True, text=True, check=False)


@asynccontextmanager
async def edge_process(coordinator: str, **variables: str) -> AsyncIterator[tuple[str, asyncio.subprocess.Process]]:
    """Run an edge before a server, and yield its address and its process, whose stdout is a pipe."""
    health_port = coordinator.rpartition(":")[2]
    settings = {"bind": free_address(), "coordinator": coordinator, "health_port": health_port, **variables}
    process = await asyncio.create_subprocess_exec(*command(), env=environment(**settings), stdout=subprocess.PIPE)
    try:
        address = settings["bind"]
        if "tls" not in variables:
            await _until_serving(address, process)
        yield address, process
    finally:
        with suppress(ProcessLookupError):
            process.kill()
        await process.wait()


@asynccontextmanager
async def edge(coordinator: str, **variables: str) -> AsyncIterator[str]:
    """Run an edge before a server, and yield its address."""
    async with edge_process(coordinator, **variables) as (address, _):
        yield address


async def _until_serving(address: str, process: asyncio.subprocess.Process) -> None:
    """Fail if the process exits before it passes a health check."""
    async with Connector(address).open() as channel:
        request = health_pb2.HealthCheckRequest(service="live")
        check = health_pb2_grpc.HealthStub(channel).Check(request, wait_for_ready=True)
        exit_ = asyncio.create_task(process.wait())
        await asyncio.wait([asyncio.ensure_future(check), exit_], return_when=asyncio.FIRST_COMPLETED)
        exit_.cancel()
        assert process.returncode is None, f"HAProxy exited with status {process.returncode}"
        await check
