"""The three processes, each on its own host, with mutual TLS on every hop."""

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from deploy.trial.hosts import ADDRESSES, namespace, run
from specpool.cli.processes import Service, kill, run_module, worker_environment
from specpool.rpc.security.channel import SecurityOptions

PORTS = {"coordinator": 50050, "target": 50051, "draft": 50052}
DRAIN_SECONDS = 2.0
"""Shorter than many requests, so every drain cuts some off."""
END_SECONDS = 60.0
SLOTS = 32
NEW_KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes")


@dataclass
class HostedService(Service):
    """A process on the host of its name."""

    async def start(self) -> None:
        """Start the process in the host's namespace; it ends with this process."""
        command = ["ip", "netns", "exec", namespace(self.name), *run_module(self.module), *self.arguments]
        self.process = await asyncio.create_subprocess_exec(
            *command, "--parent-pid", str(os.getpid()), env=worker_environment(), start_new_session=True
        )

    async def end(self) -> int:
        """Drain and end the process. Return the exit status, negative for a killed process."""
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


def address_of(name: str) -> str:
    """host:port of a process."""
    return f"{ADDRESSES[name]}:{PORTS[name]}"


def make_deployment(folder: Path, target: Path, draft: Path, log_level: str) -> Deployment:
    """The processes, not started yet. `folder`: for certificates. `target`, `draft`: model folders."""
    security = make_certificates(folder)
    worker = ["--threads", "1", "--max-sequences", str(SLOTS), "--allowed-names", "coordinator"]
    links = [flag for kind in ("target", "draft") for flag in (f"--{kind}-address", address_of(kind))]
    arguments = {
        "target": ("target_worker.server", ["--model", str(target), *worker]),
        "draft": ("draft_worker.server", ["--model", str(draft), *worker]),
        "coordinator": ("coordinator.server", [*links, "--max-batch-size", str(SLOTS // 2)]),
    }
    services = {}
    for name, (module, flags) in arguments.items():
        flags += ["--host", ADDRESSES[name], "--port", str(PORTS[name]), "--drain-seconds", str(DRAIN_SECONDS)]
        for option, value in security[name].items():
            flags += [f"--{option.replace('_', '-')}", str(value)]
        flags += ["--log-level", log_level]
        services[name] = HostedService(name, module, flags, address_of(name), security["client"])
    return Deployment(services, security["client"])


def make_certificates(folder: Path) -> dict[str, SecurityOptions]:
    """A CA and a certificate for each host, made by `openssl` as in docs/security.md; options for mutual TLS."""
    ca, ca_key = folder / "ca.pem", folder / "ca.key"
    files = ("-keyout", str(ca_key), "-out", str(ca))
    run("openssl", "req", "-x509", *NEW_KEY, "-days", "1", "-subj", "/CN=specpool-trial-ca", *files)
    security = {}
    for name, address in ADDRESSES.items():
        cert, key, request = (folder / f"{name}.{ending}" for ending in ("pem", "key", "csr"))
        subject = ("-subj", f"/CN={name}", "-addext", f"subjectAltName=IP:{address}")
        run("openssl", "req", *NEW_KEY, *subject, "-keyout", str(key), "-out", str(request))
        signed_by = ("-CA", str(ca), "-CAkey", str(ca_key), "-CAcreateserial", "-days", "1")
        out = ("-copy_extensions", "copy", "-out", str(cert))
        run("openssl", "x509", "-req", "-in", str(request), *signed_by, *out)
        security[name] = SecurityOptions(tls_ca=ca, tls_cert=cert, tls_key=key)
    return security


@asynccontextmanager
async def running(deployment: Deployment) -> AsyncIterator[None]:
    """Run all processes; none is restarted if it ends. ProcessFailedError."""
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
