"""Runs the edge of `deploy/edge` with a real HAProxy."""

import asyncio
import shutil
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc
import pytest
from deployment import DEPLOY
from grpc_health.v1 import health_pb2, health_pb2_grpc
from serving import free_address

from specpool.rpc.security.channel import Connector

CONFIGURATION = DEPLOY / "edge/haproxy.cfg"


def haproxy() -> str:
    return shutil.which("haproxy", path="/usr/sbin:/usr/local/sbin:/usr/bin:/usr/local/bin") or pytest.skip(
        "HAProxy is not installed"
    )


def checked(**variables: str) -> subprocess.CompletedProcess[str]:
    """Check the configuration with these EDGE_* variables."""
    command = [haproxy(), "-c", "-f", str(CONFIGURATION)]
    return subprocess.run(command, env=_environment(variables), capture_output=True, text=True, check=False)


@asynccontextmanager
async def edge(coordinator: str, tls_ca: str | None = None, **variables: str) -> AsyncIterator[str]:
    """Run an edge before a server and yield its address. `variables`: EDGE_* without the prefix, in any case."""
    address = free_address()
    where = {"bind": address, "coordinator": coordinator, "health_port": coordinator.rpartition(":")[2]}
    command = [haproxy(), "-db", "-f", str(CONFIGURATION)]
    process = await asyncio.create_subprocess_exec(*command, env=_environment(where | variables))
    try:
        if tls_ca is None:
            async with Connector(address).open() as channel:
                await _answered(channel)
        yield address
    finally:
        process.kill()
        await process.wait()


async def _answered(channel: grpc.aio.Channel) -> None:
    request = health_pb2.HealthCheckRequest(service="live")
    await health_pb2_grpc.HealthStub(channel).Check(request, wait_for_ready=True)


def _environment(variables: dict[str, str]) -> dict[str, str]:
    return {f"EDGE_{name.upper()}": value for name, value in variables.items()}
