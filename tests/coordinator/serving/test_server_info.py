"""Polling the state costs little, however often clients ask."""

import asyncio
from typing import Any

import pytest
from serving import RecordingTarget, serving

from coordinator.workers import states
from specpool.v1 import common_pb2


class CountingTarget(RecordingTarget):
    """Counts queries of its load."""

    queries = 0

    async def GetWorkerInfo(self, request: Any, context: Any) -> common_pb2.GetWorkerInfoResponse:
        self.queries += 1
        await asyncio.sleep(0.02)
        return await super().GetWorkerInfo(request, context)


async def test_frequent_polls_share_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    target = CountingTarget()
    async with serving(target) as served:
        monkeypatch.setattr(states, "RECENT_SECONDS", 60.0)
        target.queries = 0
        infos = await asyncio.gather(*(served.info() for _ in range(50)))
        infos += [await served.info() for _ in range(50)]
        assert target.queries == 1
        assert {info.uptime_s for info in infos} == {infos[0].uptime_s}


async def test_answers_are_recent(monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving() as served:
        monkeypatch.setattr(states, "RECENT_SECONDS", 0.05)
        before = await served.info()
        await asyncio.sleep(0.1)
        assert (await served.info()).uptime_s > before.uptime_s


async def test_a_caller_that_leaves_does_not_end_the_query_of_others() -> None:
    async with serving(CountingTarget()) as served:
        left, stays = (asyncio.ensure_future(served.info()) for _ in range(2))
        await asyncio.sleep(0.01)
        left.cancel()
        assert (await stays).target.state == "ready"
