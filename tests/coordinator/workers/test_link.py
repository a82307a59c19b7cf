"""What a link learns from the worker's description."""

import asyncio
from typing import Any

import pytest

from coordinator.prompts.tokenizer_pool import TokenizerPool
from coordinator.workers.interface import Cause
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
        (common_pb2.StepCosts(rows=[1, 16], seconds=[0.02, 0.035]), 0.059),
        (common_pb2.StepCosts(max_rows=1), 40 * 0.02),  # not measured
        (common_pb2.StepCosts(rows=[0, 16], seconds=[0.02, 0.035], max_rows=1), 40 * 0.02),  # impossible
    ],
)
async def test_step_times_follow_the_reported_costs(
    costs: common_pb2.StepCosts, seconds: float, tokenizers: TokenizerPool
) -> None:
    target = CuttingTarget(costs)
    link = TargetLink(Connector(await target.start()), "coordinator", 60, tokenizers)
    try:
        await link._probe()
        assert link.is_ready
        assert link.step_times(40) == pytest.approx(seconds)
    finally:
        await link.close()
        await target.stop()


async def test_concurrent_load_queries_share_one_call(tokenizers: TokenizerPool) -> None:
    class Counting(FakeTarget):
        queries = 0

        async def GetWorkerInfo(self, request: Any, context: Any) -> common_pb2.GetWorkerInfoResponse:
            self.queries += 1
            await asyncio.sleep(0.1)
            return await super().GetWorkerInfo(request, context)

    target = Counting()
    link = TargetLink(Connector(await target.start()), "coordinator", 60, tokenizers)
    try:
        loads = await asyncio.gather(*(link.load() for _ in range(100)))
        assert {described.load.slots_total for described in loads if described is not None} == {16}
        assert len(loads) == 100
        assert target.queries == 1
        await link.load()
        assert target.queries == 2
    finally:
        await link.close()
        await target.stop()


async def test_a_link_that_loses_its_worker_can_still_be_cancelled(tokenizers: TokenizerPool) -> None:
    """`asyncio.wait_for` of Python 3.11 swallows a cancellation at the moment that it returns."""
    target = FakeTarget()
    link = TargetLink(Connector(await target.start()), "coordinator", 60, tokenizers)
    connected = asyncio.create_task(link.keep_connected())
    try:
        await link.wait_ready()
        await asyncio.sleep(0.05)
        await target.stop()
        link._lost("the connection broke", Cause.LOST)
        connected.cancel()
        done, _ = await asyncio.wait([connected], timeout=5)
        assert done
    finally:
        connected.cancel()
        await link.close()
