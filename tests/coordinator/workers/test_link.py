"""What a link learns from the worker's description."""

import asyncio
from typing import Any

import pytest

from coordinator.workers.target_link import TargetLink
from specpool.rpc.security.channel import Connector
from specpool.testing import FakeTarget
from specpool.v1 import common_pb2


class CuttingTarget(FakeTarget):
    """A target with the given step costs."""

    def __init__(self, costs: common_pb2.StepCosts) -> None:
        super().__init__()
        self._costs = costs

    async def GetWorkerInfo(self, request: Any, context: Any) -> common_pb2.GetWorkerInfoResponse:
        response = await super().GetWorkerInfo(request, context)
        response.costs.CopyFrom(self._costs)
        return response


@pytest.mark.parametrize(
    ("costs", "seconds"),
    [
        (common_pb2.StepCosts(rows=[1, 16], seconds=[0.02, 0.035], max_rows=16), 2 * 0.035 + 0.027),
        (common_pb2.StepCosts(rows=[1, 16], seconds=[0.02, 0.035]), 0.059),  # an older worker
        (common_pb2.StepCosts(max_rows=1), 40 * 0.02),  # not measured
        (common_pb2.StepCosts(rows=[0, 16], seconds=[0.02, 0.035], max_rows=1), 40 * 0.02),  # impossible
    ],
)
async def test_step_times_follow_the_reported_costs(costs: common_pb2.StepCosts, seconds: float) -> None:
    target = CuttingTarget(costs)
    link = TargetLink(Connector(await target.start()), "coordinator", timeout_seconds=60)
    try:
        await link._probe()
        assert link.is_ready
        assert link.step_times(40) == pytest.approx(seconds)
    finally:
        await link.close()
        await target.stop()


async def test_concurrent_load_queries_share_one_call() -> None:
    class Counting(FakeTarget):
        queries = 0

        async def GetWorkerInfo(self, request: Any, context: Any) -> common_pb2.GetWorkerInfoResponse:
            self.queries += 1
            await asyncio.sleep(0.1)
            return await super().GetWorkerInfo(request, context)

    target = Counting()
    link = TargetLink(Connector(await target.start()), "coordinator", timeout_seconds=60)
    try:
        loads = await asyncio.gather(*(link.load() for _ in range(100)))
        assert {load.slots_total for load in loads if load is not None} == {16}
        assert len(loads) == 100
        assert target.queries == 1
        await link.load()
        assert target.queries == 2
    finally:
        await link.close()
        await target.stop()
