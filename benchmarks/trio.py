"""Coordinator and workers as three processes whose memory is watched, with proxies between them."""

import asyncio
import statistics
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from specpool.cli.processes import Service, free_port, kill
from specpool.testing import CuttingProxy

DRAIN_SECONDS = 2


@dataclass
class Trio:
    """Three processes that serve."""

    services: list[Service]
    proxies: list[CuttingProxy] = field(default_factory=list)
    """The proxies between the coordinator and its workers, if there are any."""

    @property
    def address(self) -> str:
        """Address of the coordinator."""
        return self.services[-1].address

    def resident_mib(self) -> dict[str, float]:
        """Resident memory of each process in MiB, by its name."""
        pids = {service.name: service.process.pid for service in self.services if service.process is not None}
        return {name: psutil.Process(pid).memory_info().rss / 2**20 for name, pid in pids.items()}

    def has_ended(self) -> list[str]:
        """Names of the processes that have ended."""
        its = [service for service in self.services if service.process is not None]
        return [service.name for service in its if service.process and service.process.returncode is not None]


@asynccontextmanager
async def running_trio(
    target: Path, draft: Path, slots: int, coordinator_flags: Sequence[str] = (), proxied: bool = False
) -> AsyncIterator[Trio]:
    """Runs a target, a draft and a coordinator. `slots`: slots of each worker; `coordinator_flags`: further arguments
    of the coordinator. `proxied`: whether the coordinator reaches its workers through proxies.

    ProcessFailedError. No process is started again if it ends.
    """
    shared = ["--log-level", "error", "--drain-seconds", str(DRAIN_SECONDS)]
    workers = [_worker("target", target, slots, shared), _worker("draft", draft, slots, shared)]
    proxies = [CuttingProxy() for _ in workers] if proxied else []
    trio = Trio([*workers], proxies)
    try:
        addresses = [worker.address for worker in workers]
        if proxied:
            starts = [proxy.start(address) for proxy, address in zip(proxies, addresses, strict=True)]
            addresses = await asyncio.gather(*starts)
        port = free_port()
        arguments = ["--port", str(port), "--target-address", addresses[0], "--draft-address", addresses[1]]
        address = f"127.0.0.1:{port}"
        flags = [*arguments, *shared, *coordinator_flags]
        trio.services.append(Service("coordinator", "coordinator.server", flags, address))
        for service in trio.services:
            await service.start()
        await asyncio.gather(*(service.wait_serving() for service in trio.services))
        yield trio
    finally:
        try:
            for service in reversed(trio.services):
                await service.stop(DRAIN_SECONDS)
            for proxy in proxies:
                await proxy.stop()
        finally:
            await kill([service.process for service in trio.services if service.process is not None])


def memory(samples: Sequence[dict[str, float]], warm_up: float, to_the_most: bool) -> dict[str, dict[str, float]]:
    """Resident memory of each process in MiB, from samples in order of time: the first sample, the median after a share
    `warm_up` of the samples, the highest sample, and the median near the end.

    `growth` is from the warm-up to the end or, with `to_the_most`, from the first sample to the highest.
    """
    warm = samples[round(len(samples) * warm_up) :]
    tenth = max(1, len(warm) // 10)
    rows = {}
    for name, first in samples[0].items():
        after, last = (statistics.median(its[name] for its in some) for some in (warm[:tenth], warm[-tenth:]))
        most = max(its[name] for its in samples)
        growth = most - first if to_the_most else last - after
        row = {"first": first, "after_warm_up": after, "most": most, "last": last, "growth": growth}
        rows[name] = {measure: round(value, 1) for measure, value in row.items()}
    return rows


def _worker(kind: str, model: Path, slots: int, shared: list[str]) -> Service:
    port = free_port()
    arguments = ["--model", str(model), "--port", str(port), "--threads", "1", "--max-sequences", str(slots), *shared]
    return Service(f"{kind} worker", f"{kind}_worker.server", arguments, f"127.0.0.1:{port}")
