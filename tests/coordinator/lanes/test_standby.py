"""A standby is a lane that opens when the target is lost: no token changes, and only one of the two serves."""

import asyncio
from collections.abc import Awaitable, Callable
from itertools import chain, repeat
from typing import Any
from unittest import mock

import grpc
import pytest
from replicas import long_requests, slow_target, stream_all, with_standby
from scraping import scrape
from serving import PATIENCE_SECONDS, RecordingTarget, Serving, free_address, make_request, serving

from coordinator.workers.interface import MismatchError
from specpool.rpc.ports import free_port
from specpool.testing import FakeTarget
from specpool.v1 import common_pb2
from specpool.v1 import generation_pb2 as pb

NOT_SERVING, SERVING = 2, 1


class Exclusive(RecordingTarget):
    """A target that records whether it serves a round while another one does."""

    overlaps = 0

    def __init__(self, other: "Exclusive | None" = None, **knobs: Any) -> None:
        super().__init__(pass_seconds=lambda _: 0.002, **knobs)
        self.running: list[Exclusive] = other.running if other is not None else []
        self.is_stopping = False

    async def Verify(self, request: Any, context: Any) -> Any:
        self.overlaps += any(target is not self and not target.is_stopping for target in self.running)
        self.running.append(self)
        try:
            return await super().Verify(request, context)
        finally:
            self.running.remove(self)

    async def stop(self) -> None:
        """Connections close first, and handlers are cancelled a moment later."""
        self.is_stopping = True
        await super().stop()
        self.is_stopping = False


async def lose(served: Serving, act: Callable[[], Awaitable[None]] | None = None) -> None:
    """Call `act`, by default stop the target, while requests stream. All answers must be right."""
    await stream_all(served, long_requests(4), act or served.target.stop)


async def takeovers(served: Serving) -> float:
    port = served.process.coordinator.settings.metrics_port
    assert port is not None
    return (await scrape(port)).value("specpool:target_takeovers_total")


@pytest.mark.parametrize(
    "settings",
    [
        {},
        pytest.param({"overlap": "on"}, marks=pytest.mark.slow),
        pytest.param({"policy": "eqspec"}, marks=pytest.mark.slow),
        pytest.param({"num_speculative_tokens": 0}, marks=pytest.mark.slow),
    ],
    ids=str,
)
async def test_standby_takes_over_and_the_target_becomes_the_standby(settings: dict[str, Any]) -> None:
    first = Exclusive()
    second = Exclusive(first)
    async with with_standby(second, first=first, metrics_port=free_port(), **settings) as (served, address):
        await lose(served, first.stop)
        info = await served.until_idle()
        assert (info.target.address, info.target.state) == (address, "ready")
        assert (info.standby.address, info.standby.state) == (served.target_address, "connecting")
        assert info.standby.reason

        await first.start(served.target_address)
        await served.until(lambda info: info.standby.state == "ready")
        assert (await served.info()).target.address == address, "no fail-back"
        await lose(served, second.stop)
        info = await served.info()
        assert (info.target.address, info.standby.address) == (served.target_address, address)
        assert [target.address for target in info.targets] == [served.target_address]
        assert await takeovers(served) == 2
        assert dict(info.counters.finished) == {"length": 8}
        assert first.overlaps == second.overlaps == 0


async def test_standby_takes_over_from_an_idle_target() -> None:
    async with with_standby(slow_target(), ready=False, probe_seconds=3600.0) as (served, address):
        standby = served.process.coordinator.lanes.standby
        assert standby is not None
        async with asyncio.timeout(PATIENCE_SECONDS):
            await standby.link.wait_ready()
        await served.target.stop()
        await served.expect(make_request())
        assert (await served.info()).target.address == address


class Unhurried(RecordingTarget):
    """A target that answers questions about itself once `answers` is set."""

    def __init__(self) -> None:
        super().__init__(pass_seconds=lambda _: 0.002)
        self.answers, self.asked = asyncio.Event(), asyncio.Event()
        self.answers.set()

    async def GetWorkerInfo(self, request: Any, context: Any) -> common_pb2.GetWorkerInfoResponse:
        self.asked.set()
        await self.answers.wait()
        return await super().GetWorkerInfo(request, context)


async def test_the_state_is_consistent_while_the_standby_takes_over() -> None:
    standby = Unhurried()
    async with with_standby(standby, probe_seconds=3600.0) as (served, address):
        standby.asked.clear()
        standby.answers.clear()
        asking = asyncio.create_task(served.info())
        await standby.asked.wait()
        await served.target.stop()
        await served.expect(make_request())
        standby.answers.set()
        info = await asking
        assert (info.target.address, info.standby.address) == (address, served.target_address)


async def test_round_of_a_hanging_target_is_given_up() -> None:
    """The former target answers late. It frees its caches before it serves again."""
    target = Exclusive()
    standby = Exclusive(target)
    async with with_standby(standby, first=target) as (served, address):

        async def hang() -> None:
            target.open.clear()
            await target._health.set("", NOT_SERVING)

        await lose(served, hang)
        assert (await served.info()).target.address == address
        assert target.caches
        target.open.set()
        await target._health.set("", SERVING)
        await served.until(lambda info: info.standby.state == "ready" and not target.caches)
        await lose(served, standby.stop)
        assert (await served.info()).target.address == served.target_address


async def test_lost_standby_changes_nothing() -> None:
    standby = slow_target()
    async with with_standby(standby, metrics_port=free_port()) as (served, _):
        await lose(served, standby.stop)
        info = await served.until(lambda info: info.standby.state == "connecting")
        assert (info.target.state, info.target.address) == ("ready", served.target_address)
        assert (standby.calls, await takeovers(served)) == (0, 0)


async def test_requests_wait_while_both_are_down_and_the_first_to_return_serves() -> None:
    standby = slow_target()
    async with with_standby(standby) as (served, address):

        async def lose_both() -> None:
            await standby.stop()
            await served.target.stop()
            await served.until(lambda info: "ready" not in (info.target.state, info.standby.state))
            assert await served.status() == NOT_SERVING
            await standby.start(address)

        await lose(served, lose_both)
        info = await served.info()
        assert (info.target.address, info.target.state) == (address, "ready")


async def test_service_starts_without_its_standby() -> None:
    standby = free_address()
    async with serving(target_standby_address=standby) as served:
        await served.expect(make_request())
        info = await served.info()
        assert (info.standby.address, info.standby.state) == (standby, "connecting")
        late = FakeTarget()
        await late.start(standby)
        try:
            await served.until(lambda info: info.standby.state == "ready")
        finally:
            await late.stop()


async def test_standby_serves_if_the_target_is_down_at_start() -> None:
    standby = RecordingTarget()
    address = await standby.start()
    try:
        with mock.patch("coordinator.lanes.lanes.LISTEN_SECONDS", 0.2):
            async with serving(with_target=False, with_draft=False, target_standby_address=address) as served:
                info = await served.until(lambda info: info.target.state == "ready")
                assert (info.target.address, info.standby.address) == (address, served.target_address)
                await served.expect(make_request([1, 2], 20))
    finally:
        await standby.stop()


async def test_target_and_not_its_standby_decides_the_model() -> None:
    """Both start at the same time, and a standby with another model is ready first."""
    target, other = RecordingTarget(), RecordingTarget(fingerprint="other")
    address = await other.start()
    try:
        async with serving(target, with_target=False, with_draft=False, target_standby_address=address) as served:
            info = await served.until(lambda info: info.standby.reason.startswith("waiting for the target worker at "))
            assert info.target.state == "connecting"
            await target.start(served.target_address)
            info = await served.until(lambda info: info.standby.state == "refused")
            assert info.target.state == "ready"
            await served.expect(make_request())
            assert other.requests == []
    finally:
        await other.stop()


class Described(RecordingTarget):
    """A target with changes to its description."""

    def __init__(self, **changes: Any) -> None:
        super().__init__(pass_seconds=lambda _: 0.002)
        self.changes = changes

    async def GetWorkerInfo(self, request: Any, context: Any) -> common_pb2.GetWorkerInfoResponse:
        response = await super().GetWorkerInfo(request, context)
        response.model.MergeFrom(common_pb2.ModelInfo(**self.changes))
        return response


async def test_standby_with_another_model_is_refused_and_the_service_goes_on() -> None:
    target, standby = Described(numerics_fingerprint="same"), Described(numerics_fingerprint="other")
    async with with_standby(standby, first=target, ready=False, metrics_port=free_port()) as (served, _):
        info = await served.until(lambda info: info.standby.state == "refused")
        assert "numerics_fingerprint was same, is other" in info.standby.reason

        async def restart() -> None:
            await target.stop()
            await served.until(lambda info: info.target.state == "connecting")
            await target.start(served.target_address)

        await lose(served, restart)
        assert (standby.requests, await takeovers(served)) == ([], 0)
        standby.changes = target.changes  # it has been replaced
        await served.until(lambda info: info.standby.state == "ready")


async def test_target_that_returns_with_another_model_is_replaced_by_the_standby() -> None:
    target, standby = Described(numerics_fingerprint="same"), Described(numerics_fingerprint="same")
    with pytest.raises(MismatchError, match="numerics_fingerprint"):  # noqa: PT012 - raised when the service ends
        async with with_standby(standby, first=target) as (served, address):
            stopped = asyncio.create_task(served.process.wait_stopped())
            target.changes = {"numerics_fingerprint": "other"}
            await target.stop()
            await served.until(lambda info: info.target.address == address)
            await target.start(served.target_address)
            info = await served.until(lambda info: info.standby.state == "refused")
            assert (info.target.address, info.target.state) == (address, "ready")
            await stream_all(served, long_requests(4))
            # Once both run another model, the coordinator ends, to be restarted for it.
            standby.changes = target.changes
            await standby.stop()
            await served.until(lambda info: info.target.state == "connecting")
            await standby.start(address)
            await asyncio.wait_for(stopped, PATIENCE_SECONDS)


async def test_lengths_of_both_workers_may_differ() -> None:
    """The maximum length may depend on the memory that was free at start. Every sequence fits in both workers."""
    target = slow_target(max_model_len=512)
    async with with_standby(slow_target(max_model_len=1024), first=target) as (served, _):
        await lose(served)
        assert (await served.stub.GetModelInfo(pb.GetModelInfoRequest())).max_model_len == 512
        await target.start(served.target_address)
        await served.until(lambda info: info.standby.state == "ready")


async def lose_begun(served: Serving, requests: list[pb.GenerateRequest]) -> list[grpc.StatusCode]:
    """Stop the target once it has begun requests, which the standby may not continue. Return how they end."""
    running = [asyncio.ensure_future(served.stub.Generate(request)) for request in requests]
    await served.until(lambda info: info.counters.completion_tokens > 100)
    await served.target.stop()
    ended = await asyncio.gather(*running, return_exceptions=True)
    return [end.code() for end in ended if isinstance(end, grpc.aio.AioRpcError)]


async def test_standby_without_grammars_ends_constrained_requests() -> None:
    standby = slow_target(supports_grammars=False)
    async with with_standby(standby, max_num_seqs=2) as (served, _):
        requests = [make_request([i, 2], 400, regex="[a-z]{2000,}") for i in range(4)]  # two wait
        assert await lose_begun(served, requests) == [grpc.StatusCode.UNIMPLEMENTED] * 4
        await served.expect(make_request())


async def test_renewed_certificates_cause_no_takeover() -> None:
    async with with_standby(slow_target(), metrics_port=free_port()) as (served, _):
        link = served.process.coordinator.target

        async def renew() -> None:
            outdated = mock.PropertyMock(side_effect=chain([True], repeat(False)))
            with (
                mock.patch.object(type(link._connector), "is_outdated", outdated),
                mock.patch.object(link, "_reconnect"),
            ):
                await link._probe()

        await lose(served, renew)
        assert await takeovers(served) == 0
