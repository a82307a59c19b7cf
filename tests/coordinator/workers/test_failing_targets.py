"""A target worker that refuses every round is taken out of service until it serves a trial round."""

import asyncio
from typing import Any

import pytest
from grpc import StatusCode
from grpc.aio import AioRpcError
from grpc_health.v1 import health_pb2
from replicas import replicas, with_standby
from serving import RecordingTarget, Serving, make_request, serving

from specpool.rpc.status import ANSWERED
from specpool.v1 import generation_pb2 as pb

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


class BreakableTarget(RecordingTarget):
    """A target that refuses every round while it is broken."""

    def __init__(self, **knobs: Any) -> None:
        super().__init__(**knobs)
        self.is_broken, self.refusals = False, 0

    async def Verify(self, request: Any, context: Any) -> Any:
        if self.is_broken:
            self.refusals += 1
            await context.abort(StatusCode.INTERNAL, "the device is broken", (ANSWERED,))
        return await super().Verify(request, context)


def some_requests(number: int) -> list[pb.GenerateRequest]:
    return [make_request(range(i, 3 * i + 1), 40, k=0) for i in range(number)]


async def break_in_a_round(served: Serving, target: BreakableTarget, number: int) -> list["asyncio.Task[Any]"]:
    """Send requests, and break the target once it has answered some of their rounds."""
    running = [asyncio.create_task(served.expect(request)) for request in some_requests(number)]
    await served.until(lambda info: info.counters.completion_tokens > 2 * number)
    target.is_broken = True
    return running


@pytest.mark.slow
async def test_the_only_target_that_fails_every_round_is_not_serving() -> None:
    target = BreakableTarget(slots=2)
    async with serving(target, with_draft=False) as served:
        running = await break_in_a_round(served, target, 6)
        info = await served.until(lambda info: info.target.state == "resting")
        assert "fails every round: INTERNAL: the device is broken" in info.target.reason
        await served.until(lambda _: target.refusals > 6)
        assert await served.status() == await served.status("specpool.v1.GenerationService") == NOT_SERVING
        later = asyncio.create_task(served.expect(make_request([9], 5)))
        target.is_broken = False
        await asyncio.gather(*running, later)
        await served.until(lambda info: info.target.state == "ready")
        assert await served.status() == SERVING
        info = await served.until_idle()
        assert dict(info.counters.finished) == {"length": 7}


async def test_a_restarted_target_serves_again() -> None:
    target = BreakableTarget()
    async with serving(target, with_draft=False) as served:
        running = await break_in_a_round(served, target, 3)
        await served.until(lambda info: info.target.state == "resting")
        await target.stop()
        target.is_broken = False
        await target.start(served.target_address)
        await asyncio.gather(*running)


async def test_a_second_target_continues_without_an_error() -> None:
    targets = [BreakableTarget(), BreakableTarget()]
    async with replicas(targets[1], first=targets[0], with_draft=False) as served:
        running = await break_in_a_round(served, targets[0], 8)
        await asyncio.gather(*running)
        info = await served.until(lambda info: "resting" in [target.state for target in info.targets])
        assert info.target.state == "ready"
        assert await served.status() == SERVING
        assert dict(info.counters.finished) == {"length": 8}


@pytest.mark.slow
async def test_a_broken_target_is_not_a_ready_standby() -> None:
    target = BreakableTarget()
    async with with_standby(BreakableTarget(), first=target, with_draft=False) as (served, address):
        running = await break_in_a_round(served, target, 8)
        await asyncio.gather(*running)
        await served.until(lambda _: target.refusals > 6)
        info = await served.info()
        assert (info.target.address, info.target.state) == (address, "ready")
        assert (info.standby.address, info.standby.state) == (served.target_address, "resting")
        assert "fails every round" in info.standby.reason
        assert dict(info.counters.finished) == {"length": 8}
        target.is_broken = False
        await served.until(lambda info: info.standby.state == "ready")


async def test_a_refused_request_fails_alone() -> None:
    class Picky(BreakableTarget):
        async def Verify(self, request: Any, context: Any) -> Any:
            self.is_broken = any(250 in item.token_ids for item in request.items)
            return await super().Verify(request, context)

    target = Picky()
    async with serving(target, with_draft=False) as served:
        # gRPC may hide that a worker refused a round of a stream. The round then counts as a failure.
        with pytest.raises(AioRpcError, match=r"refused the sequence twice|failed 4 times") as caught:
            await served.stub.Generate(make_request([250], 5))
        assert caught.value.code() is StatusCode.INTERNAL
        await served.expect(make_request([1], 5))
        info = await served.until_idle()
        assert info.target.state == "ready"
        assert await served.status() == SERVING
