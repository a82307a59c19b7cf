"""The three processes, each on its own host, with mutual TLS on every hop."""

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from deploy.trial.certificates import Authority
from deploy.trial.namespaces import ADDRESSES, namespace
from specpool.cli.processes import Service, kill, run_module, worker_environment
from specpool.rpc.security.channel import SecurityOptions

PORTS = {"coordinator": 50050, "target": 50051, "draft": 50052}
DRAIN_SECONDS = 2.0
"""Shorter than many requests take, so that a drain cuts some of them off."""
END_SECONDS = 60.0
"""Time for a restarted process to end, on a machine that may be busy."""
SLOTS = 32


@dataclass
class HostedService(Service):
    """A process on the host that has its name."""

    async def start(self) -> None:
        """Starts the process in the host's namespace; it ends by itself if we are killed."""
        command = ["ip", "netns", "exec", namespace(self.name), *run_module(self.module), *self.arguments]
        self.process = await asyncio.create_subprocess_exec(
            *command, "--parent-pid", str(os.getpid()), env=worker_environment(), start_new_session=True
        )

    async def end(self) -> int:
        """Asks the process to drain and to end; returns its exit status, which is negative if it had to be killed."""
        await self.stop(END_SECONDS)
        assert self.process is not None
        assert self.process.returncode is not None
        return self.process.returncode


@dataclass(frozen=True)
class Deployment:
    """The service on its hosts, and how a client reaches it."""

    services: dict[str, HostedService]
    client_security: SecurityOptions

    @property
    def address(self) -> str:
        """Address of the coordinator."""
        return address_of("coordinator")


def make_deployment(folder: Path, target: Path, draft: Path, log_level: str) -> Deployment:
    """The processes, not started yet, and their certificates in a folder. `target`, `draft`: folders of models."""
    authority = Authority(folder)
    security = {host: authority.issue(host, address) for host, address in ADDRESSES.items()}
    links = [flag for kind in ("target", "draft") for flag in (f"--{kind}-address", address_of(kind))]
    its_arguments = {
        "target": ("target_worker.server", _worker_flags(target)),
        "draft": ("draft_worker.server", _worker_flags(draft)),
        "coordinator": ("coordinator.server", [*links, "--max-batch-size", str(SLOTS // 2)]),
    }
    services = {}
    for name, (module, arguments) in its_arguments.items():
        flags = [*arguments, *_server_flags(name, security[name]), "--log-level", log_level]
        services[name] = HostedService(name, module, flags, address_of(name), security["client"])
    return Deployment(services, security["client"])


@asynccontextmanager
async def running(deployment: Deployment) -> AsyncIterator[None]:
    """A context in which all processes serve. None is started again if it ends. ProcessFailedError."""
    services = deployment.services
    try:
        for service in services.values():
            await service.start()
        await asyncio.gather(*(service.wait_serving() for service in services.values()))
        yield
    finally:
        try:
            for service in reversed(services.values()):
                await service.stop(DRAIN_SECONDS)
        finally:
            await kill([service.process for service in services.values() if service.process is not None])


def address_of(name: str) -> str:
    """host:port of a process."""
    return f"{ADDRESSES[name]}:{PORTS[name]}"


def _worker_flags(model: Path) -> list[str]:
    slots = str(SLOTS)
    return ["--model", str(model), "--threads", "1", "--max-sequences", slots, "--allowed-names", "coordinator"]


def _server_flags(name: str, security: SecurityOptions) -> list[str]:
    flags = ["--host", ADDRESSES[name], "--port", str(PORTS[name]), "--drain-seconds", str(DRAIN_SECONDS)]
    for option, value in security.items():
        flags += [f"--{option.replace('_', '-')}", str(value)]
    return flags
