"""Coordinator and workers as processes, with proxies between them and a watch on their memory."""

import asyncio
import os
import statistics
import tempfile
from collections import defaultdict
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from unittest import mock

import psutil
from lab.proxy import CuttingProxy
from lab.records import FOLDER, Records

from specpool.cli.processes import Service, kill
from specpool.rpc.ports import free_port

DRAIN_SECONDS = 2
ROLES = ("target", "draft")


Life = tuple[str, int]
"""A process: the name of its service, and its id."""


@dataclass
class Processes:
    """The running processes; the coordinator comes last."""

    services: list[Service]
    proxies: list[CuttingProxy] = field(default_factory=list)
    """Proxies between the coordinator and its workers, if any."""
    records: dict[str, Records] = field(default_factory=dict)
    """DNS records that the coordinator follows, by role."""

    @property
    def coordinator(self) -> Service:
        return self.services[-1]

    @property
    def address(self) -> str:
        """The coordinator's address."""
        return self.coordinator.address

    def workers(self, role: str) -> list[Service]:
        """The workers of a role."""
        return [service for service in self.services if service.name.startswith(role)]

    def resident_mib(self) -> dict[Life, float]:
        """Resident memory in MiB of each process that runs."""
        resident = {}
        for service in self.services:
            if service.process is not None:
                with suppress(psutil.Error):  # it has ended
                    process = psutil.Process(service.process.pid)
                    resident[service.name, service.process.pid] = process.memory_info().rss / 2**20
        return resident

    def ended(self) -> list[str]:
        """Names of the processes that have ended."""
        return [each.name for each in self.services if each.process and each.process.returncode is not None]


@asynccontextmanager
async def running(
    target: Path | str,
    draft: Path | str | None,
    slots: int,
    coordinator_flags: Sequence[str] = (),
    proxied: bool = False,
    workers: tuple[int, int] = (1, 1),
    worker_flags: Sequence[str] = (),
    devices_can_fail: bool = False,
) -> AsyncIterator[Processes]:
    """Run the processes; none is restarted if it ends. ProcessFailedError.

    `draft`: the model of draft workers; None: there are none. `proxied`: put a proxy on each link. `workers`: numbers
    of target and draft workers. Several are found by name, in DNS records that can be changed. `devices_can_fail`: see
    `lab.failing_device`.
    """
    shared = ["--log-level", "error", "--drain-seconds", str(DRAIN_SECONDS)]
    flags = [*shared, "--max-sequences", str(slots), *worker_flags]
    models = [each for each in zip(ROLES, (target, draft), workers, strict=True) if each[1] is not None]
    groups = {role: _workers(role, str(model), count, flags) for role, model, count in models}
    processes = Processes([worker for group in groups.values() for worker in group])
    if devices_can_fail:
        for role, group in groups.items():
            for worker in group:
                worker.module, worker.arguments = "lab.failing_device", [role, *worker.arguments]
    with tempfile.TemporaryDirectory() as folder, _environment(folder):
        try:
            processes.proxies = [CuttingProxy() for _ in processes.services] if proxied else []
            addresses = {role: group[0].address for role, group in groups.items()}
            if proxied:
                starting = zip(groups, processes.proxies, strict=True)
                addresses = {role: await proxy.start(addresses[role]) for role, proxy in starting}
            elif max(workers) > 1:
                processes.records = {role: Records(Path(folder), role, group) for role, group in groups.items()}
                addresses = {role: records.address for role, records in processes.records.items()}
            port = free_port()
            own = ["--port", str(port), *(f"--{role}-address={address}" for role, address in addresses.items())]
            module = "lab.records" if processes.records else "coordinator.server"
            arguments = [*own, *shared, *coordinator_flags]
            processes.services.append(Service("coordinator", module, arguments, f"127.0.0.1:{port}"))
            for service in processes.services:
                await service.start()
            await asyncio.gather(*(service.wait_serving() for service in processes.services))
            yield processes
        finally:
            await _stop(processes)


async def _stop(processes: Processes) -> None:
    try:
        for service in reversed(processes.services):
            await service.stop(DRAIN_SECONDS)
        for proxy in processes.proxies:
            await proxy.stop()
    finally:
        await kill([service.process for service in processes.services if service.process is not None])


def _environment(folder: str) -> "mock._patch_dict":
    """Let child processes import this package, and find the records."""
    paths = [str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    return mock.patch.dict(os.environ, {FOLDER: folder, "PYTHONPATH": os.pathsep.join(filter(None, paths))})


def _workers(role: str, model: str, count: int, flags: Iterable[str]) -> list[Service]:
    """Workers that listen on one port of different loopback addresses, as the hosts behind a name do."""
    port, services = free_port(), []
    for number in range(1, count + 1):
        host = f"127.0.0.{number}"
        arguments = ["--model", model, "--host", host, "--port", str(port), "--threads", "1", *flags]
        name = f"{role} worker" + f" {number}" * (count > 1)
        services.append(Service(name, f"{role}_worker.server", arguments, f"{host}:{port}"))
    return services


def memory(samples: Sequence[dict[Life, float]], warm_up: float, from_first: bool) -> dict[str, dict[str, float]]:
    """Resident memory of each process in MiB: first sample, median after a share `warm_up`, maximum, median at the end.

    `growth` counts from the warm-up to the end or, with `from_first`, from the first sample to the maximum. A restarted
    service is represented by the process that lived longest.
    """
    lives: dict[Life, list[float]] = defaultdict(list)
    for sample in samples:
        for life, value in sample.items():
            lives[life].append(value)
    longest = {name: values for (name, _), values in sorted(lives.items(), key=lambda item: len(item[1]))}
    rows = {}
    for name, values in sorted(longest.items()):
        warm = values[round(len(values) * warm_up) :]
        tenth = max(1, len(warm) // 10)
        after, last = (statistics.median(some) for some in (warm[:tenth], warm[-tenth:]))
        first, maximum = values[0], max(values)
        growth = maximum - first if from_first else last - after
        row = {"first": first, "after_warm_up": after, "maximum": maximum, "last": last, "growth": growth}
        rows[name] = {measure: round(value, 1) for measure, value in row.items()}
    return rows
