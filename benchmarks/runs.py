"""Repeat runs of several cases in turns, and compare their speeds."""

import asyncio
import statistics
from collections.abc import Awaitable, Callable, Hashable, Mapping, Sequence
from typing import Any, TypeVar

from benchmarks.report import progress
from coordinator.workers.states import RECENT_SECONDS
from specpool.client import AsyncClient
from specpool.v1 import generation_pb2 as pb

Case = TypeVar("Case", bound=Hashable)
Run = dict[str, Any]


async def in_turns(
    cases: Sequence[Case], repeats: int, run: Callable[[Case], Awaitable[Run]], what: str = "runs"
) -> dict[Case, list[Run]]:
    """Run all cases in turns, `repeats` times. Return the runs of each case."""
    runs: dict[Case, list[Run]] = {case: [] for case in cases}
    for case in progress([*cases] * repeats, what):
        runs[case].append(await run(case))
    return runs


def ratios(runs: Sequence[Mapping[str, Any]], base: Sequence[Mapping[str, Any]], name: str) -> list[float]:
    """Ratios of a measure to that of `base` in the same repeat, where both have it."""
    pairs = ((run.get(name), other.get(name)) for run, other in zip(runs, base, strict=True))
    return [ours / theirs for ours, theirs in pairs if ours and theirs]


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median, minimum and maximum of ratios, as columns of a row."""
    found = {"ratio": statistics.median(values), "ratio_min": min(values), "ratio_max": max(values)}
    return {name: round(value, 3) for name, value in found.items()}


async def current_info(client: AsyncClient) -> pb.GetServerInfoResponse:
    """Return the server info, once the coordinator no longer reuses an older answer."""
    await asyncio.sleep(RECENT_SECONDS)
    return await client.server_info()
