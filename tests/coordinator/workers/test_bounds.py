"""Workers that send too much: oversized messages are rejected before parsing, and phases are read slowly."""

from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
import pytest
from loading_workers import LoadingDraft
from serving import RecordingTarget, Serving, make_request, serving

from coordinator.workers.bounds import PHASES_PER_PROBE
from specpool.protocol.responses import MAX_SMALL_BYTES
from specpool.testing import FakeDraft, FakeTarget
from specpool.v1 import common_pb2

NO_PROBE_SECONDS = 3600.0
CALLS = 100
"""Calls that give the coordinator time to misbehave."""


class Reporting(FakeTarget):
    """A target that is loading, and reports the given phases in every watch."""

    def __init__(self, phases: Callable[[], AsyncIterator[str]]) -> None:
        super().__init__()
        self.loading = True
        self.phases, self.watches = phases, 0

    async def WatchStartup(self, request: Any, context: Any) -> AsyncIterator[common_pb2.WatchStartupResponse]:
        self.watches += 1
        async for phase in self.phases():
            yield common_pb2.WatchStartupResponse(phase=phase)


async def one() -> AsyncIterator[str]:
    yield "loading"


async def endless() -> AsyncIterator[str]:
    number = 0
    while True:
        number += 1
        yield f"phase {number}"


async def large() -> AsyncIterator[str]:
    while True:
        yield "p" * 2**23


async def call_often(served: Serving) -> None:
    for _ in range(CALLS):
        await served.info()


async def test_phases_are_read_slowly() -> None:
    async with serving(
        Reporting(endless), with_draft=False, with_target=False, probe_seconds=NO_PROBE_SECONDS
    ) as served:
        await served.target.start(served.target_address)
        served.process.coordinator.target._probe_now.set()
        last = f"phase {PHASES_PER_PROBE}"
        await served.until(lambda info: info.target.reason == last)
        await call_often(served)
        assert (await served.info()).target.reason == last


async def test_a_watch_that_ends_is_not_repeated_before_the_next_probe() -> None:
    target = Reporting(one)
    async with serving(target, with_draft=False, with_target=False, probe_seconds=NO_PROBE_SECONDS) as served:
        await target.start(served.target_address)
        served.process.coordinator.target._probe_now.set()
        await served.until(lambda info: info.target.reason == "loading")
        await call_often(served)
        assert target.watches <= 2, "the first probe, and the one that the test asked for"


async def test_large_phases_end_the_watch() -> None:
    target = Reporting(large)
    async with serving(target, with_draft=False, with_target=False) as served:
        await target.start(served.target_address)
        await served.until(lambda info: info.target.state == "resting" and "startup is too large" in info.target.reason)
        target.phases = one
        await served.until(lambda info: info.target.state == "loading")
        await target.loaded()
        await served.until_ready()
        await served.expect(make_request())


async def test_a_draft_that_serves_is_used_although_its_watch_never_ends() -> None:
    target = FakeTarget()
    draft = LoadingDraft(target)
    async with serving(target, draft, wait_for_draft=False) as served:
        await served.until(lambda info: info.draft.state == "loading")
        await FakeDraft.loaded(draft)  # the startup does not end
        await served.until_ready()
        response = await served.expect(make_request(k=4))
        assert response.speculative_decoding.num_draft_tokens


class Oversized(RecordingTarget):
    """A target whose answers to a method are too large, while `size` is not 0."""

    def __init__(self, method: str, size: int) -> None:
        super().__init__()
        self.method, self.size = method, size

    async def Verify(self, request: Any, context: Any) -> Any:
        response = await super().Verify(request, context)
        if self.method == "Verify":
            for result in response.results:
                result.features = bytes(self.size)
        return response

    async def GetWorkerInfo(self, request: Any, context: Any) -> Any:
        response = await super().GetWorkerInfo(request, context)
        if self.method == "GetWorkerInfo":
            response.model.notes.append("n" * self.size)
        return response

    async def Release(self, request: Any, context: Any) -> Any:
        response = await super().Release(request, context)
        if self.method == "Release" and self.size:
            response.instance_id = "i" * self.size
        return response


@pytest.mark.slow
@pytest.mark.parametrize("method", ["Verify", "Release"])
async def test_the_coordinator_backs_off_from_a_target_with_oversized_responses(method: str) -> None:
    target = Oversized(method, 20 * 2**20)
    async with serving(target, with_draft=False) as served:
        for number in range(2):
            try:
                await served.stub.Generate(make_request([number, 1], request_id=f"r{number}"), timeout=1)
            except grpc.aio.AioRpcError:
                continue
        await served.until(lambda info: info.target.state == "resting" and "too large" in info.target.reason)
        target.size = 0
        await served.until_ready()
        await served.expect(make_request())


async def test_a_description_that_is_too_large_is_refused() -> None:
    target = Oversized("GetWorkerInfo", MAX_SMALL_BYTES)
    async with serving(target, with_draft=False, with_target=False) as served:
        await target.start(served.target_address)
        await served.until(lambda info: "description is too large" in info.target.reason)
        target.size = 0
        await served.until_ready()
        await served.expect(make_request())
