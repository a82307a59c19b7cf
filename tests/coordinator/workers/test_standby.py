"""A standby takes over from a lost target: no token changes, and only one of the two is used at a time."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from itertools import chain, repeat
from typing import Any
from unittest import mock

import grpc
import pytest
from pydantic import ValidationError
from scraping import scrape
from secure_service import until
from serving import (
    DEFAULTS,
    PATIENCE_SECONDS,
    RecordingTarget,
    Serving,
    check_tokens,
    free_address,
    make_request,
    serving,
    stream,
)

from coordinator.config.settings import CoordinatorSettings
from coordinator.server import CoordinatorServer
from coordinator.workers.errors import MismatchError
from coordinator.workers.states import LinkState
from specpool.rpc.ports import free_port
from specpool.testing import FakeTarget
from specpool.v1 import common_pb2
from specpool.v1 import generation_pb2 as pb

NOT_SERVING, SERVING = 2, 1


class Exclusive(RecordingTarget):
    """A target that records which of several serves each round, and whether two serve rounds at once."""

    running: list["Exclusive"]
    served: list["Exclusive"]
    overlaps = 0
    stopping = False

    def __init__(self, other: "Exclusive | None" = None, **knobs: Any) -> None:
        super().__init__(pass_seconds=lambda _: 0.002, **knobs)
        self.running, self.served = (other.running, other.served) if other is not None else ([], [])

    async def Verify(self, request: Any, context: Any) -> Any:
        self.overlaps += any(target is not self and not target.stopping for target in self.running)
        self.running.append(self)
        self.served.append(self)
        try:
            return await super().Verify(request, context)
        finally:
            self.running.remove(self)

    async def stop(self) -> None:
        """Connections close first, and handlers are cancelled a moment later."""
        self.stopping = True
        await super().stop()
        self.stopping = False


@asynccontextmanager
async def paired(
    target: FakeTarget | None = None, standby: FakeTarget | None = None, ready: bool = True, **settings: Any
) -> AsyncIterator[tuple[Serving, FakeTarget, str]]:
    """A coordinator with two targets. Yields the service, the standby and its address."""
    target = target if target is not None else Exclusive()
    standby = standby if standby is not None else Exclusive(target if isinstance(target, Exclusive) else None)
    address = await standby.start()
    try:
        async with serving(target, target_standby_address=address, metrics_port=free_port(), **settings) as served:
            if ready:
                await served.until(lambda info: info.standby.state == "ready")
            yield served, standby, address
    finally:
        await standby.stop()


def long_requests(count: int = 4) -> list[pb.GenerateRequest]:
    sampled = {"temperature": 1.0, "seed": 5}
    return [make_request([i, 2, 3], 200, ignore_eos=True, **(sampled if i % 2 else {})) for i in range(count)]


async def stream_all(served: Serving, after: int, act: Callable[[], Any], count: int = 4) -> list[pb.GenerateResponse]:
    """Stream requests, and call `act` once that many tokens are committed. All answers must be right."""
    requests = long_requests(count)
    streams = [asyncio.ensure_future(stream(served, request)) for request in requests]
    before = (await served.info()).counters.completion_tokens
    await served.until(lambda info: info.counters.completion_tokens > before + after)
    await act()
    answers = [complete for _, complete in await asyncio.gather(*streams)]
    for request, answer in zip(requests, answers, strict=True):
        check_tokens(served.target, request, answer)
    return answers


async def takeovers(served: Serving) -> float:
    port = served.process.coordinator.settings.metrics_port
    assert port is not None
    return (await scrape(port)).value("specpool:target_takeovers_total")


@pytest.mark.parametrize(
    "settings", [{}, {"overlap": "on"}, {"policy": "eqspec"}, {"num_speculative_tokens": 0}], ids=str
)
async def test_standby_takes_over_and_the_target_becomes_the_standby(settings: dict[str, Any]) -> None:
    async with paired(**settings) as (served, standby, address):
        first, second = served.target, standby
        await stream_all(served, 100, first.stop)
        info = await served.until_idle()
        assert (info.target.address, info.target.state) == (address, "ready")
        assert (info.standby.address, info.standby.state) == (served.target_address, "connecting")
        assert info.standby.reason

        await first.start(served.target_address)
        await served.until(lambda info: info.standby.state == "ready")
        assert (await served.info()).target.address == address, "no fail-back"
        await stream_all(served, 100, second.stop)
        info = await served.info()
        assert (info.target.address, info.standby.address) == (served.target_address, address)
        assert await takeovers(served) == 2
        assert dict(info.counters.finished) == {"length": 8}
        assert first.overlaps == second.overlaps == 0  # type: ignore[attr-defined]


async def test_lost_connections_do_not_count_against_a_request() -> None:
    """Another process serves after each of them, but none has crashed."""
    async with paired() as (served, standby, _):
        for target in (served.target, standby):
            target.fail_next = [grpc.StatusCode.UNAVAILABLE] * 3
        await served.expect(make_request())
        assert await takeovers(served) >= 1  # the trial rounds fail too


async def test_standby_takes_over_from_an_idle_target() -> None:
    async with paired(probe_seconds=3600.0, ready=False) as (served, standby, address):
        async with asyncio.timeout(10):
            await served.process.coordinator.targets.links[1].wait_ready()
        await served.target.stop()
        await served.expect(make_request())
        assert (await served.info()).target.address == address
        assert standby.calls


async def test_round_of_a_hanging_target_is_given_up() -> None:
    """The former target still holds caches, and answers late. The coordinator never uses either again."""
    target = Exclusive()
    async with paired(target, Exclusive(target)) as (served, standby, address):

        async def hang() -> None:
            target.open.clear()
            await target._health.set("", NOT_SERVING)

        await stream_all(served, 100, hang)
        assert (await served.info()).target.address == address
        asked = len(target.requests)
        target.open.set()
        await target._health.set("", SERVING)
        await served.until(lambda info: info.standby.state == "ready")
        stale = set(target.caches)
        assert stale
        await stream_all(served, 100, standby.stop)
        assert {key for key in target.caches if key in stale} == stale
        assert all(request.coordinator_id not in {key[0] for key in stale} for request in target.requests[asked:])


async def test_lost_standby_changes_nothing() -> None:
    async with paired() as (served, standby, _):
        await stream_all(served, 100, standby.stop)
        info = await served.until(lambda info: info.standby.state == "connecting")
        assert (info.target.state, info.target.address) == ("ready", served.target_address)
        assert (standby.calls, await takeovers(served)) == (0, 0)


async def test_requests_wait_while_both_are_down_and_the_first_to_return_serves() -> None:
    async with paired() as (served, standby, address):

        async def lose_both() -> None:
            await standby.stop()
            await served.target.stop()
            await served.until(lambda info: "ready" not in (info.target.state, info.standby.state))
            assert await served.status() == NOT_SERVING
            await standby.start(address)

        await stream_all(served, 100, lose_both)
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
        with mock.patch("coordinator.workers.standby.LISTEN_SECONDS", 0.2):
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


class Described(Exclusive):
    """A target with changes to its description."""

    def __init__(self, other: Exclusive | None = None, **changes: Any) -> None:
        super().__init__(other)
        self.changes = changes

    async def GetWorkerInfo(self, request: Any, context: Any) -> common_pb2.GetWorkerInfoResponse:
        response = await super().GetWorkerInfo(request, context)
        response.model.MergeFrom(common_pb2.ModelInfo(**self.changes))
        return response


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"numerics_fingerprint": "other"}, "numerics_fingerprint was same, is other"),
        ({"device": "cuda:0 (NVIDIA H200)"}, "device was cpu"),
        ({"equivalence": common_pb2.EQUIVALENCE_NUMERIC}, "equivalence was"),
        ({"activations": "int8", "numerics_fingerprint": "other"}, "activations was float32, is int8"),
        ({"max_model_len": 64}, "max_model_len was 4096, is 64"),
    ],
)
async def test_standby_with_another_model_is_refused_and_the_service_goes_on(
    changes: dict[str, Any], reason: str
) -> None:
    target = Described(numerics_fingerprint="same")
    standby = Described(target, **{"numerics_fingerprint": "same", **changes})
    async with paired(target, standby, ready=False) as (served, _, _):
        info = await served.until(lambda info: info.standby.state == "refused")
        assert reason in info.standby.reason

        async def restart() -> None:
            await target.stop()
            await served.until(lambda info: info.target.state == "connecting")
            await target.start(served.target_address)

        await stream_all(served, 100, restart)
        assert (standby.requests, await takeovers(served)) == ([], 0)
        standby.changes = {"numerics_fingerprint": "same"}  # it has been replaced
        await served.until(lambda info: info.standby.state == "ready")


async def test_target_that_returns_with_another_model_is_replaced_by_the_standby() -> None:
    target = Described(numerics_fingerprint="same")
    standby = Described(target, numerics_fingerprint="same")
    with pytest.raises(MismatchError, match="numerics_fingerprint"):  # noqa: PT012 - raised when the service ends
        async with paired(target, standby) as (served, _, address):
            stopped = asyncio.create_task(served.process.wait_stopped())
            target.changes = {"numerics_fingerprint": "other"}
            await target.stop()
            await served.until(lambda info: info.target.address == address)
            await target.start(served.target_address)
            info = await served.until(lambda info: info.standby.state == "refused")
            assert (info.target.address, info.target.state) == (address, "ready")
            await stream_all(served, 100, lambda: asyncio.sleep(0))
            # Once both run another model, the coordinator ends, to be restarted for it.
            standby.changes = target.changes
            await standby.stop()
            await served.until(lambda info: info.target.state == "connecting")
            await standby.start(address)
            await asyncio.wait_for(stopped, PATIENCE_SECONDS)


async def test_lengths_of_both_workers_may_differ() -> None:
    """The maximum length may depend on the memory that was free at start. Every sequence fits in both workers."""
    target = Exclusive(max_model_len=512)
    async with paired(target, Exclusive(target, max_model_len=1024)) as (served, _, _):
        await stream_all(served, 100, target.stop)
        assert (await served.stub.GetModelInfo(pb.GetModelInfoRequest())).max_model_len == 512
        await target.start(served.target_address)
        await served.until(lambda info: info.standby.state == "ready")


async def test_renewed_certificates_cause_no_takeover() -> None:
    async with paired() as (served, _, _):
        link = served.process.coordinator.target

        async def renew() -> None:
            outdated = mock.PropertyMock(side_effect=chain([True], repeat(False)))
            with (
                mock.patch.object(type(link._connector), "is_outdated", outdated),
                mock.patch.object(link, "_reconnect"),
            ):
                await link._probe()

        await stream_all(served, 100, renew)
        assert await takeovers(served) == 0


async def test_standby_must_be_another_process() -> None:
    target = RecordingTarget()
    port = (await target.start()).rpartition(":")[2]
    try:
        settings = {"target_address": f"127.0.0.1:{port}", "target_standby_address": f"localhost:{port}"}
        process = CoordinatorServer(CoordinatorSettings(**{**DEFAULTS, **settings}))
        await process.start()
        standby = process.coordinator.targets.links[1]
        await until(lambda: standby.state is LinkState.REFUSED)
        assert "is the target worker itself" in standby.reason
        assert process.coordinator.target.is_ready
        process.server.stop()
        await process.wait_stopped()
    finally:
        await target.stop()


def test_standby_must_be_another_worker() -> None:
    with pytest.raises(ValidationError, match="target_standby_address must not be target_address"):
        CoordinatorSettings(target_address="a:1", target_standby_address="a:1")
