"""The well-behaved client: its latency on an open connection, and on a new one."""

import asyncio
import statistics
import time
from dataclasses import dataclass, field
from itertools import count

import grpc
from attacks.service import Service

from specpool.client import AsyncClient

TOKENS, PROMPTS = 8, 16
"""Tokens of an answer, and number of different prompts."""
PAUSE_SECONDS, NEWCOMER_PAUSE_SECONDS, SAMPLE_SECONDS = 0.05, 0.2, 0.1
PATIENCE_SECONDS = 60.0


@dataclass
class Figures:
    """What the well-behaved client saw."""

    seconds: list[float] = field(default_factory=list)
    """Latency of each request on an open connection."""
    newcomer_seconds: list[float] = field(default_factory=list)
    """Latency of each request on a new connection."""
    wrong: int = 0
    failed: int = 0
    growth: int = 0
    """Bytes by which the process grew that grew most."""
    logged: int = 0
    """Bytes logged by all processes."""


class Victim:
    """Keeps asking for eight tokens, and compares each answer with the first one for its prompt."""

    def __init__(self, service: Service, concurrency: int) -> None:
        self._service, self._concurrency = service, concurrency
        self._numbers = count()
        self._answers: dict[int, list[int]] = {}

    async def measure(self, seconds: float) -> Figures:
        """Ask for some time, and until the last request is answered."""
        figures, ends = Figures(), time.monotonic() + seconds
        memory, logged = self._service.memory(), self._service.logged()
        async with self._client() as client, asyncio.TaskGroup() as tasks:
            tasks.create_task(self._watch(figures, memory, ends))
            tasks.create_task(self._as_newcomer(figures, ends))
            for _ in range(self._concurrency):
                tasks.create_task(self._ask_until(client, figures, ends))
        figures.logged = self._service.logged() - logged
        return figures

    def _client(self) -> AsyncClient:
        return AsyncClient(self._service.coordinator, token=self._service.tokens["victim"], retry_seconds=0)

    async def _ask_until(self, client: AsyncClient, figures: Figures, ends: float) -> None:
        while time.monotonic() < ends:
            await self._ask(client, figures, figures.seconds)
            await asyncio.sleep(PAUSE_SECONDS)

    async def _as_newcomer(self, figures: Figures, ends: float) -> None:
        while time.monotonic() < ends:
            async with self._client() as client:
                await self._ask(client, figures, figures.newcomer_seconds)
            await asyncio.sleep(NEWCOMER_PAUSE_SECONDS)

    async def _ask(self, client: AsyncClient, figures: Figures, latencies: list[float]) -> None:
        number, began = next(self._numbers) % PROMPTS, time.perf_counter()
        try:
            answer = await client.generate(
                [number + 1, 2, 3], max_tokens=TOKENS, ignore_eos=True, timeout_seconds=PATIENCE_SECONDS
            )
        except grpc.aio.AioRpcError:
            figures.failed += 1
        else:
            tokens = list(answer.token_ids)
            figures.wrong += tokens != self._answers.setdefault(number, tokens)
        latencies.append(time.perf_counter() - began)

    async def _watch(self, figures: Figures, before: dict[str, int], ends: float) -> None:
        while time.monotonic() < ends:
            growth = max(after - before[role] for role, after in self._service.memory().items())
            figures.growth = max(figures.growth, growth)
            await asyncio.sleep(SAMPLE_SECONDS)


def median_and_p95(seconds: list[float]) -> tuple[float, float]:
    """Median and 95th percentile in milliseconds. `seconds`: at least one latency."""
    p95 = statistics.quantiles(seconds, n=20, method="inclusive")[-1] if len(seconds) > 1 else seconds[0]
    return round(1000 * statistics.median(seconds), 1), round(1000 * p95, 1)
