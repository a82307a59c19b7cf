"""Runs the edge of `deploy/edge` with a real HAProxy."""

import asyncio
import shutil
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from serving import free_address

from specpool.rpc.security.channel import open_channel

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
async def edge(coordinator: str, **variables: str) -> AsyncIterator[str]:
    """Run an edge before a server, and yield its address."""
    address, health_port = free_address(), coordinator.rpartition(":")[2]
    settings = environment(bind=address, coordinator=coordinator, health_port=health_port, **variables)
    process = await asyncio.create_subprocess_exec(*command(), env=settings)
    try:
        if "tls" not in variables:
            async with open_channel(address) as channel:
                request = health_pb2.HealthCheckRequest(service="live")
                await health_pb2_grpc.HealthStub(channel).Check(request, wait_for_ready=True)
        yield address
    finally:
        process.kill()
        await process.wait()
