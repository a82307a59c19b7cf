"""Coordinator and both workers as three processes, with proxies between them and a watch on their memory."""

import asyncio
import statistics
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import psutil
from lab.proxy import CuttingProxy

from specpool.cli.processes import Service, kill
from specpool.rpc.ports import free_port

DRAIN_SECONDS = 2


@dataclass
class Processes:
    """The running processes; the coordinator comes last."""

    services: list[Service]
    proxies: list[CuttingProxy] = field(default_factory=list)
    """Proxies between the coordinator and its workers, if any."""

    @property
    def address(self) -> str:
        """The coordinator's address."""
        return self.services[-1].address

    def resident_mib(self) -> dict[str, float]:
        """Resident memory of each process in MiB."""
        pids = {service.name: service.process.pid for service in self.services if service.process is not None}
        return {name: psutil.Process(pid).memory_info().rss / 2**20 for name, pid in pids.items()}

    def ended(self) -> list[str]:
        """Names of the processes that have ended."""
        return [each.name for each in self.services if each.process and each.process.returncode is not None]


@asynccontextmanager
async def running(
    target: Path, draft: Path, slots: int, coordinator_flags: Sequence[str] = (), proxied: bool = False
) -> AsyncIterator[Processes]:
    """Run the processes; none is restarted if it ends. `proxied`: put a proxy on each link. ProcessFailedError."""
    shared = ["--log-level", "error", "--drain-seconds", str(DRAIN_SECONDS)]
    workers = [_worker("target", target, slots, shared), _worker("draft", draft, slots, shared)]
    processes = Processes([*workers], [CuttingProxy() for _ in workers] if proxied else [])
    try:
        addresses = [worker.address for worker in workers]
        if proxied:
            addresses = [await proxy.start(to) for proxy, to in zip(processes.proxies, addresses, strict=True)]
        port = free_port()
        flags = ["--port", str(port), "--target-address", addresses[0], "--draft-address", addresses[1]]
        flags += [*shared, *coordinator_flags]
        processes.services.append(Service("coordinator", "coordinator.server", flags, f"127.0.0.1:{port}"))
        for service in processes.services:
            await service.start()
        await asyncio.gather(*(service.wait_serving() for service in processes.services))
        yield processes
    finally:
        try:
            for service in reversed(processes.services):
                await service.stop(DRAIN_SECONDS)
            for proxy in processes.proxies:
                await proxy.stop()
        finally:
            await kill([service.process for service in processes.services if service.process is not None])


def memory(samples: Sequence[dict[str, float]], warm_up: float, from_first: bool) -> dict[str, dict[str, float]]:
    """Resident memory of each process in MiB: first sample, median after a share `warm_up`, maximum, median at the end.

    `growth` counts from the warm-up to the end or, with `from_first`, from the first sample to the maximum.
    """
    warm = samples[round(len(samples) * warm_up) :]
    tenth = max(1, len(warm) // 10)
    rows = {}
    for name, first in samples[0].items():
        after, last = (statistics.median(sample[name] for sample in some) for some in (warm[:tenth], warm[-tenth:]))
        maximum = max(sample[name] for sample in samples)
        growth = maximum - first if from_first else last - after
        row = {"first": first, "after_warm_up": after, "maximum": maximum, "last": last, "growth": growth}
        rows[name] = {measure: round(value, 1) for measure, value in row.items()}
    return rows


def _worker(kind: str, model: Path, slots: int, shared: list[str]) -> Service:
    port = free_port()
    arguments = ["--model", str(model), "--port", str(port), "--threads", "1", "--max-sequences", str(slots), *shared]
    return Service(f"{kind} worker", f"{kind}_worker.server", arguments, f"127.0.0.1:{port}")
