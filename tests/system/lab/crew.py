"""Faults of real processes: they are killed, stopped, starved of memory or disk, and leave. All of them come back."""

import asyncio
import random
import resource
import statistics
import time
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import grpc
import psutil
from lab.load import Pulse
from lab.processes import ROLES, Processes

from specpool.cli.probes import is_serving
from specpool.cli.processes import Service
from specpool.rpc.security.channel import Connector

POLL_SECONDS = 0.02
SHORT_STOP, LONG_STOP = 0.3, 8.0
"""Seconds of SIGSTOP: shorter and longer than a worker's deadlines."""
STARVED_SECONDS = 1.0
AWAY_SECONDS = 1.0
SERVING_SECONDS = 120.0
"""Time for a process to serve again before that counts as a fault of the service."""
NOTHING = 0


@dataclass(frozen=True)
class Recovery:
    """What one fault cost. Times are in seconds, from its beginning."""

    kind: str
    role: str
    serving: float
    """Until the process was serving again."""
    resumed: float
    """Until every answer in progress had another token or its end."""


class Crew:
    """Lets faults happen to the processes, one at a time for each role."""

    def __init__(self, processes: Processes, pulse: Pulse, rng: random.Random, kinds: Sequence[str]) -> None:
        """`kinds`: names of FAULTS that may happen to workers. A coordinator can only be killed."""
        self.recoveries: list[Recovery] = []
        self.died: Counter[str] = Counter()
        """Processes that ended although no fault killed them, by kind of fault."""
        self.disturbed: set[str] = set()
        """Names of the processes that have not recovered yet."""
        self.faults: list[str] = []
        """What went wrong with the service, one sentence each."""
        self.restarts = 0
        """How often the coordinator was killed."""
        self._processes, self._pulse, self._rng, self._kinds = processes, pulse, rng, kinds

    async def coordinator_serves(self) -> None:
        """Wait until the coordinator is serving."""
        while self._processes.coordinator.name in self.disturbed:  # noqa: ASYNC110 - a client polls
            await asyncio.sleep(POLL_SECONDS)

    async def happen(self, role: str) -> None:
        """Let a random fault happen to a process of a role, and wait until everything has recovered."""
        victims = self._processes.workers(role) if role in ROLES else [self._processes.coordinator]
        victim = self._rng.choice(victims)
        kind = self._rng.choice(self._kinds) if role in ROLES else "kill"
        self.restarts += role not in ROLES
        self.disturbed.add(victim.name)
        began = time.perf_counter()
        resumed = asyncio.create_task(self._pulse.resumed(began))
        try:
            async with asyncio.timeout(SERVING_SECONDS):
                await FAULTS[kind](self._processes, victim)
                self.died[kind] += await _revive(victim)
                await _wait_serving(victim)
                serving = time.perf_counter() - began
                self.recoveries.append(Recovery(kind, role, serving, await resumed))
        except TimeoutError:
            self.faults.append(f"{kind} of the {victim.name}: not serving after {SERVING_SECONDS:g} s")
        finally:
            resumed.cancel()
            self.disturbed.discard(victim.name)

    def table(self) -> list[dict[str, Any]]:
        """Recovery times in seconds, by kind of fault."""
        groups: dict[tuple[str, str], list[Recovery]] = defaultdict(list)
        for recovery in self.recoveries:
            groups[recovery.kind, recovery.role].append(recovery)
        return [
            {
                "fault": kind,
                "process": role,
                "number": len(group),
                **_times("serving", group),
                **_times("resumed", group),
            }
            for (kind, role), group in sorted(groups.items())
        ]


def _times(name: str, recoveries: Sequence[Recovery]) -> dict[str, float]:
    times = [getattr(recovery, name) for recovery in recoveries]
    return {f"{name}, median": round(statistics.median(times), 2), f"{name}, max": round(max(times), 2)}


async def _revive(victim: Service) -> int:
    """Start a process that has ended. Return 1 if it had, else 0."""
    assert victim.process is not None
    if victim.process.returncode is None:
        return 0
    await victim.start()
    return 1


async def _wait_serving(victim: Service) -> None:
    """Wait until a process is serving; start it again if it ends meanwhile."""
    async with Connector(victim.address).open() as channel:
        while True:
            await _revive(victim)
            with suppress(grpc.aio.AioRpcError):
                if await is_serving(channel):
                    return
            await asyncio.sleep(POLL_SECONDS)


def _pid(victim: Service) -> int:
    assert victim.process is not None
    return victim.process.pid


async def _kill(processes: Processes, victim: Service) -> None:
    assert victim.process is not None
    victim.process.kill()
    await victim.process.wait()
    await victim.start()


async def _stop(seconds: float, processes: Processes, victim: Service) -> None:
    process = psutil.Process(_pid(victim))
    process.suspend()
    await asyncio.sleep(seconds)
    process.resume()


async def _leave(processes: Processes, victim: Service) -> None:
    """The worker leaves the list, drains, ends, and comes back as a new process."""
    records = processes.records[victim.name.partition(" ")[0]]
    records.remove(victim)
    await asyncio.sleep(AWAY_SECONDS)
    await victim.stop(drain_seconds=LONG_STOP)
    await victim.start()
    await _wait_serving(victim)
    records.add(victim)


@contextmanager
def _limited(victim: Service, limit: int, value: int) -> Iterator[None]:
    """Lower a resource limit of a process, if it still runs."""
    with suppress(ProcessLookupError):
        _, hard = resource.prlimit(_pid(victim), limit)
        resource.prlimit(_pid(victim), limit, (value, hard))
    yield
    with suppress(ProcessLookupError):
        resource.prlimit(_pid(victim), limit, (hard, hard))


async def _no_memory(processes: Processes, victim: Service) -> None:
    """The process cannot allocate more memory for a while. It may end."""
    with _limited(victim, resource.RLIMIT_AS, psutil.Process(_pid(victim)).memory_info().vms):
        await asyncio.sleep(STARVED_SECONDS)


async def _full_disk(processes: Processes, victim: Service) -> None:
    """The process restarts while it can write no file. It may end."""
    await _kill(processes, victim)
    with _limited(victim, resource.RLIMIT_FSIZE, NOTHING):
        await _wait_serving(victim)


async def _less_memory(processes: Processes, victim: Service) -> None:
    """The process restarts with fewer slots, and later with all of them."""
    index = victim.arguments.index("--max-sequences") + 1
    slots, victim.arguments[index] = victim.arguments[index], str(max(1, int(victim.arguments[index]) // 4))
    await _kill(processes, victim)
    await _wait_serving(victim)
    victim.arguments[index] = slots


FAULTS: dict[str, Callable[[Processes, Service], Awaitable[None]]] = {
    "kill": _kill,
    "short stop": lambda *who: _stop(SHORT_STOP, *who),
    "long stop": lambda *who: _stop(LONG_STOP, *who),
    "leave": _leave,
    "no memory": _no_memory,
    "less memory": _less_memory,
    "full disk": _full_disk,
}
"""Faults by name."""
