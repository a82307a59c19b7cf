"""The steps of the trial: each disturbs the service under load, awaits the recovery, and reports faults."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial

import grpc

from deploy.trial.hosts import Network
from deploy.trial.load import Load, Tally
from deploy.trial.services import Deployment
from deploy.trial.timeline import Event
from specpool.cli.processes import ProcessFailedError
from specpool.client import AsyncClient
from specpool.rpc.status import status_line
from specpool.v1 import generation_pb2 as pb

STEADY_SECONDS, SETTLE_SECONDS = 10.0, 5.0
"""Undisturbed time at the start and the end, and after each recovery."""
START_SECONDS, RECOVERY_SECONDS, POLL_SECONDS = 120.0, 30.0, 0.25
"""Limits for the start of a process and for a recovery, and the interval of polls."""

Disturbance = Callable[[], Awaitable[list[str]]]
"""Disturbs the service; returns faults, one sentence each."""


@dataclass(frozen=True)
class Step:
    """A disturbance and its effect on clients."""

    event: Event
    recovered: float
    """Seconds from the end of the disturbance until the service generated and drafted tokens again."""
    tokens_per_s: float
    """Tokens per second during the disturbance."""
    longest_pause: float
    """Longest time without a token until the recovery, in seconds."""
    faults: list[str]

    @property
    def row(self) -> dict[str, object]:
        """The step as a row of a table."""
        return {
            "step": self.event.name,
            "seconds": round(self.event.ended - self.event.began, 1),
            "tokens_per_s": round(self.tokens_per_s, 1),
            "longest_pause_s": round(self.longest_pause, 2),
            "recovered_s": round(self.recovered, 1),
            "verdict": "; ".join(self.faults) or "passed",
        }


class Steps:
    """Disturbances of a service under load."""

    def __init__(
        self, network: Network, deployment: Deployment, client: AsyncClient, load: Load, cut_seconds: float
    ) -> None:
        """`cut_seconds`: how long a host is cut off."""
        self._network, self._deployment, self._client, self._load = network, deployment, client, load
        self._cut_seconds = cut_seconds

    async def run(self) -> list[Step]:
        """Run all steps in order."""
        disturbances: dict[str, Disturbance] = {
            "before": self.steady,
            "draft cut off": partial(self.cut_off, "draft"),
            "target cut off": partial(self.cut_off, "target"),
            "coordinator cut off": partial(self.cut_off, "coordinator"),
            "draft restarted": partial(self.restart, "draft"),
            "target restarted": partial(self.restart, "target"),
            "coordinator restarted": partial(self.restart, "coordinator"),
            "after": self.steady,
        }
        return [await self._step(name, disturb) for name, disturb in disturbances.items()]

    async def _step(self, name: str, disturb: Disturbance) -> Step:
        load, before = self._load, self._load.tally
        began = load.now
        faults = await disturb()
        ended = load.now
        faults += await self.recover()
        recovered = load.now
        await asyncio.sleep(SETTLE_SECONDS)
        faults += request_faults(before, load.tally)
        rate = load.timeline.tokens(began, ended) / (ended - began)
        pause = load.timeline.longest_pause(began, recovered)
        return Step(Event(name, began, ended), recovered - ended, rate, pause, faults)

    async def steady(self) -> list[str]:
        """Leave the service alone."""
        await asyncio.sleep(STEADY_SECONDS)
        return []

    async def cut_off(self, host: str) -> list[str]:
        """Cut a host off. Tokens must keep coming without the draft, and must stop without any other host."""
        self._network.cut_off([host])
        await asyncio.sleep(self._cut_seconds / 2)
        half = self._load.now
        await asyncio.sleep(self._cut_seconds / 2)
        tokens = self._load.timeline.tokens(half, self._load.now)
        self._network.cut_off([])
        if host == "draft":
            return [] if tokens else ["no tokens came without the draft"]
        return [f"tokens came without the {host}"] if tokens else []

    async def restart(self, name: str) -> list[str]:
        """Drain and end a process, and start it again."""
        service = self._deployment.services[name]
        status = await service.end()
        await service.start()
        try:
            async with asyncio.timeout(START_SECONDS):
                await service.wait_serving()
        except TimeoutError:
            return [f"the new {name} does not serve"]
        except ProcessFailedError as error:
            return [str(error)]
        return [f"the {name} ended with status {status}"] if status else []

    async def recover(self) -> list[str]:
        """Wait until both workers are ready and in use again."""
        first: pb.ServerCounters | None = None
        seen = "the coordinator does not answer"
        ends = self._load.now + RECOVERY_SECONDS
        while self._load.now < ends:
            try:
                info = await self._client.stub.GetServerInfo(pb.GetServerInfoRequest(), timeout=RECOVERY_SECONDS)
            except grpc.aio.AioRpcError as error:
                seen = status_line(error)
            else:
                first = first or info.counters
                if has_recovered(first, info):
                    return []
                seen = f"the target is {info.target.state}, the draft is {info.draft.state}"
            await asyncio.sleep(POLL_SECONDS)
        return [f"no recovery within {RECOVERY_SECONDS:g} s: {seen}"]


def has_recovered(before: pb.ServerCounters, info: pb.GetServerInfoResponse) -> bool:
    """Whether both workers are ready and have been used since `before`."""
    is_ready = info.target.state == info.draft.state == "ready"
    generated = info.counters.completion_tokens > before.completion_tokens
    drafted = info.counters.drafts["model"].draft_tokens > before.drafts["model"].draft_tokens
    return is_ready and generated and drafted


def request_faults(before: Tally, after: Tally) -> list[str]:
    """Faults of the requests that ended between two tallies."""
    faults = []
    if wrong := after.wrong - before.wrong:
        faults.append(f"{wrong} answers were wrong")
    if failed := after.failed - before.failed:
        faults.append(f"{failed} requests failed")
    return faults


async def leftovers(client: AsyncClient) -> list[str]:
    """Resources still in use some seconds after all requests have ended."""
    for _ in range(round(RECOVERY_SECONDS / POLL_SECONDS)):
        info = await client.server_info()
        in_use = {
            "requests": info.running + info.queued,
            "slots of the target": info.target.load.slots_in_use,
            "slots of the draft": info.draft.load.slots_in_use,
        }
        is_known = info.target.HasField("load") and info.draft.HasField("load")
        if is_known and not any(in_use.values()):
            return []
        await asyncio.sleep(POLL_SECONDS)
    return [f"{number} {name} left over" for name, number in in_use.items() if number] or ["a worker does not answer"]
