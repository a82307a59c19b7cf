"""Several target workers behind one coordinator: the load is balanced, and faults change no token."""

import asyncio
import gc
import weakref
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any
from unittest import mock

import grpc
import pytest
from pydantic import ValidationError
from replicas import long_requests, replicas, slow_target, stream_all
from serving import PATIENCE_SECONDS, RecordingTarget, Serving, check_tokens, make_request, serving, stream

from coordinator.config.settings import CoordinatorSettings
from specpool.rpc.ports import free_port
from specpool.testing import FakeTarget
from specpool.v1 import generation_pb2 as pb


class OtherModel(RecordingTarget):
    """A target that chooses other tokens."""

    def choose(self, context: Any) -> int:
        return (super().choose(context) + 1) % 200


def sequence_ids(target: FakeTarget) -> set[int]:
    """The sequences that a target has served."""
    assert isinstance(target, RecordingTarget)
    return {item.sequence_id for request in target.requests for item in request.items}


async def until_all_idle(served: Serving, *others: FakeTarget) -> None:
    """Wait until no target holds a sequence, and check the windows."""
    await served.until_idle()
    await served.until(lambda _: not any(other.caches for other in others))
    for lane in served.process.coordinator.lanes:
        lane.window.check_integrity()


@pytest.mark.parametrize("settings", [{}, {"policy": "exspec"}, {"policy": "eqspec"}, {"num_speculative_tokens": 0}])
async def test_load_is_balanced(settings: dict[str, Any]) -> None:
    targets = [slow_target(), slow_target()]
    async with replicas(targets[1], first=targets[0], **settings) as served:
        assert (await served.info()).max_num_seqs == 2 * 16
        lanes = list(served.process.coordinator.lanes)
        for lane in lanes:
            lane.window.is_open = False  # until all requests are queued: a fixed batch keeps later ones out
        streams = asyncio.ensure_future(stream_all(served, long_requests(16)))
        await served.until(lambda info: info.queued == 16)
        for lane in lanes:
            lane.update()
        await streams
        sequences = [sequence_ids(target) for target in targets]
        assert min(map(len, sequences)) >= 6
        assert not sequences[0] & sequences[1]
        await until_all_idle(served, *targets)


async def test_rounds_of_both_targets_run_at_the_same_time() -> None:
    targets = [slow_target(), slow_target()]
    async with replicas(targets[1], first=targets[0]) as served:
        targets[0].open.clear()
        streams = [asyncio.ensure_future(stream(served, request)) for request in long_requests(2)]
        async with asyncio.timeout(30):
            finished, waiting = await asyncio.wait(streams, return_when=asyncio.FIRST_COMPLETED)
        assert (len(finished), len(waiting)) == (1, 1)
        targets[0].open.set()
        await asyncio.gather(*streams)


async def test_a_request_goes_to_the_worker_with_its_prefix() -> None:
    other = slow_target()
    async with replicas(other) as served:
        prompts = [[7] * 64, [8] * 64]
        await stream_all(served, [make_request(prompt, 8) for prompt in prompts])
        for _ in range(4):
            for prompt in reversed(prompts):
                answer = await served.expect(make_request([*prompt, 1, 2, 3], 4))
                assert answer.usage.cached_tokens == 64


@pytest.mark.parametrize(
    ("victim", "settings"),
    [
        (0, {"overlap": "on"}),
        (1, {"policy": "exspec"}),
        pytest.param(0, {"policy": "eqspec"}, marks=pytest.mark.slow),
        pytest.param(1, {"num_speculative_tokens": 0}, marks=pytest.mark.slow),
    ],
)
async def test_sequences_of_a_lost_worker_continue_on_the_other(victim: int, settings: dict[str, Any]) -> None:
    targets = [slow_target(), slow_target()]
    async with replicas(targets[1], first=targets[0], **settings) as served:
        address = [target.address for target in (await served.info()).targets][victim]
        await stream_all(served, long_requests(12), targets[victim].stop)
        info = await served.info()
        assert sorted(target.state == "ready" for target in info.targets) == [False, True]
        assert info.target.address != address
        assert info.target.state == "ready"
        assert dict(info.counters.finished) == {"length": 12}

        await targets[victim].start(address)
        await served.until(lambda info: all(target.state == "ready" for target in info.targets))
        asked = len(targets[victim].requests)
        await stream_all(served, long_requests(12))
        assert len(targets[victim].requests) > asked
        await until_all_idle(served, *targets)


async def test_lost_connections_do_not_count_against_a_request() -> None:
    """Until a lost worker is back, it might have crashed."""
    targets = [slow_target(), slow_target()]
    async with replicas(targets[1], first=targets[0]) as served:
        for target in targets:
            target.fail_next = [grpc.StatusCode.UNAVAILABLE] * 3
        await served.expect(make_request())
        assert sum(len(target.fail_next) for target in targets) <= 2


async def test_sequences_wait_while_all_workers_are_lost() -> None:
    targets = [slow_target(), slow_target()]
    async with replicas(targets[1], first=targets[0]) as served:

        async def restart() -> None:
            addresses = [target.address for target in (await served.info()).targets]
            for target in targets:
                await target.stop()
            await served.until(lambda info: not any(target.state == "ready" for target in info.targets))
            assert await served.status() == 2
            await targets[1].start(addresses[1])
            await served.until(lambda info: info.target.state == "ready")
            await targets[0].start(addresses[0])

        await stream_all(served, long_requests(8), restart)


async def test_more_sequences_than_places_survive_a_loss() -> None:
    targets = [slow_target(), slow_target()]
    async with replicas(targets[1], first=targets[0], max_num_seqs=2) as served:
        await stream_all(served, long_requests(8, tokens=100), targets[0].stop)
        assert (await served.info()).running == 0


async def test_another_model_is_refused_by_name() -> None:
    replica, other = slow_target(), OtherModel()
    async with replicas(replica) as served:  # the first target that is ready decides the model
        address = (await served.info()).targets[1].address
        await replica.stop()
        await served.until(lambda info: info.targets[1].state != "ready")
        await other.start(address)
        try:
            info = await served.until(lambda info: info.targets[1].state == "refused")
            assert "weights_fingerprint was" in info.targets[1].reason
            assert info.target.state == "ready"
            await stream_all(served, long_requests(8))
            assert not other.requests
            assert await served.status() == 1
        finally:
            await other.stop()


async def test_one_process_at_two_addresses_is_used_once() -> None:
    first = slow_target()
    start = first.start

    async def start_twice(*arguments: Any) -> str:
        port = (await start(*arguments)).rpartition(":")[2]
        return f"127.0.0.1:{port},localhost:{port}"

    first.start = start_twice  # type: ignore[method-assign]
    async with serving(first) as served:
        info = await served.until(lambda info: any(target.state == "refused" for target in info.targets))
        (refused,) = [target for target in info.targets if target.state == "refused"]
        assert "is a target worker already in use" in refused.reason
        await stream_all(served, long_requests(4))


@pytest.mark.parametrize("victim", [None, 0])
async def test_requests_are_cancelled_and_aborted_in_either_lane(victim: int | None) -> None:
    targets = [slow_target(), slow_target()]
    async with replicas(targets[1], first=targets[0]) as served:
        requests = long_requests(8, tokens=2000)
        for i, request in enumerate(requests):
            request.request_id = str(i)
        calls = [served.stub.Generate(request) for request in requests]
        await served.until(lambda info: info.counters.completion_tokens > 100)
        if victim is not None:
            await targets[victim].stop()
        for i in range(4):
            calls[i].cancel()
        for i in range(4, 8):
            await served.stub.Abort(pb.AbortRequest(request_id=str(i)))
        for call in calls[4:]:
            assert (await call).finish_reason == "abort"
        await served.until(lambda info: info.running == info.queued == 0)
        for lane in served.process.coordinator.lanes:
            lane.window.check_integrity()


async def test_samples_of_a_request_on_both_workers() -> None:
    targets = [slow_target(), slow_target()]
    async with replicas(targets[1], first=targets[0]) as served:
        request = make_request([5] * 3, 100, ignore_eos=True, n=6, temperature=1.0, seed=3)
        running = asyncio.ensure_future(served.stub.Generate(request))
        await served.until(lambda info: info.counters.completion_tokens > 60)
        await targets[0].stop()
        answer = await running
        for each in (answer, *answer.other_samples):
            check_tokens(served.target, request, each)


async def test_unread_streams_pause_in_either_lane() -> None:
    """A paused sequence of a lost worker continues on the other one once it is read."""
    targets = [slow_target(), slow_target()]
    async with replicas(targets[1], first=targets[0], num_speculative_tokens=0) as served:
        queue, requests = served.process.coordinator.queue, long_requests(2, tokens=100)
        calls = [served.stub.GenerateStream(request) for request in requests]
        await served.until(lambda info: info.counters.completion_tokens > 20)
        for sequence in queue.in_flight:
            queue.pause(sequence)
        paused = queue.in_flight
        assert len(paused) == 2
        await targets[0].stop()
        async with asyncio.timeout(PATIENCE_SECONDS):
            while len(queue.preempted) != 1:  # noqa: ASYNC110 - the queue has no event for it
                await asyncio.sleep(0.01)
        for sequence in paused:
            queue.resume(sequence)
        queue.wake()
        for request, call in zip(requests, calls, strict=True):
            messages = [message async for message in call]
            check_tokens(served.target, request, messages[-1].complete)


# --- DNS names


DISCOVERY = "specpool.rpc.discovery"
HOSTS = ("127.0.0.1", "127.0.0.2", "127.0.0.3")


class Resolver:
    """A fake DNS server."""

    def __init__(self, *hosts: str) -> None:
        self.hosts: set[str] | None = set(hosts)

    async def __call__(self, host: str, port: int) -> set[str]:
        assert host == "targets"
        if self.hosts is None:
            raise OSError("no such name")
        return self.hosts


@contextmanager
def resolving(resolver: Resolver) -> Iterator[None]:
    with mock.patch(f"{DISCOVERY}._resolve", resolver), mock.patch(f"{DISCOVERY}.RESOLVE_SECONDS", 0.02):
        yield


async def started(count: int) -> tuple[list[RecordingTarget], int]:
    """Targets at the same port of several hosts, and the port."""
    targets, port = [slow_target() for _ in range(count)], free_port()
    for host, target in zip(HOSTS, targets, strict=False):
        await target.start(f"{host}:{port}")
    return targets, port


@asynccontextmanager
async def followed(resolver: Resolver, port: int) -> AsyncIterator[Serving]:
    first = slow_target()
    first.start = mock.AsyncMock(return_value=f"dns:///targets:{port}")  # type: ignore[method-assign]
    with resolving(resolver):
        async with serving(first, with_draft=False) as served:
            yield served


@pytest.mark.slow
async def test_dns_records_are_followed() -> None:
    targets, port = await started(3)
    resolver = Resolver(*HOSTS[:2])
    try:
        async with followed(resolver, port) as served:
            await served.until(lambda info: [target.state for target in info.targets] == ["ready"] * 2)

            async def replace() -> None:
                resolver.hosts = set(HOSTS[1:])
                await served.until(lambda info: f"{HOSTS[2]}:{port}" in [target.address for target in info.targets])

            await stream_all(served, long_requests(8), replace)
            info = await served.until(lambda info: len(info.targets) == 2)
            assert {target.address for target in info.targets} == {f"{host}:{port}" for host in HOSTS[1:]}
            asked = len(targets[0].requests)
            resolver.hosts = None  # the name server is down
            await stream_all(served, long_requests(8))
            assert len(targets[0].requests) == asked
            assert targets[2].requests
            await served.until(lambda _: not any(target.caches for target in targets))
    finally:
        for target in targets:
            await target.stop()


@pytest.mark.slow
async def test_a_worker_that_is_lost_and_removed_loses_nothing() -> None:
    targets, port = await started(2)
    resolver = Resolver(*HOSTS[:2])
    try:
        async with followed(resolver, port) as served:
            await served.until(lambda info: [target.state for target in info.targets] == ["ready"] * 2)

            async def remove() -> None:
                resolver.hosts = {HOSTS[1]}
                await targets[0].stop()
                await served.until(lambda info: len(info.targets) == 1)

            await stream_all(served, long_requests(8), remove)
    finally:
        for target in targets:
            await target.stop()


@pytest.mark.slow
async def test_a_removed_worker_leaves_nothing_behind() -> None:
    targets, port = await started(2)
    resolver = Resolver(*HOSTS[:2])
    try:
        async with followed(resolver, port) as served:
            await served.until(lambda info: [target.state for target in info.targets] == ["ready"] * 2)
            await stream_all(served, long_requests(8))
            lanes = {lane.address: weakref.ref(lane) for lane in served.process.coordinator.lanes}
            resolver.hosts = {HOSTS[1]}
            await served.until(lambda info: len(info.targets) == 1)
            await stream_all(served, long_requests(2))

            def is_gone(_: pb.GetServerInfoResponse) -> bool:
                gc.collect()
                return lanes[f"{HOSTS[0]}:{port}"]() is None

            await served.until(is_gone)
    finally:
        for target in targets:
            await target.stop()


@pytest.mark.slow
async def test_an_address_that_comes_back_is_used_again() -> None:
    targets, port = await started(2)
    resolver, gone = Resolver(*HOSTS[:2]), f"{HOSTS[0]}:{port}"
    try:
        async with followed(resolver, port) as served:
            await served.until(lambda info: [target.state for target in info.targets] == ["ready"] * 2)

            async def come_and_go() -> None:
                lanes = {lane.address: lane for lane in served.process.coordinator.lanes}
                resolver.hosts = {HOSTS[1]}
                await served.until(lambda _: lanes[gone].is_draining)
                assert not lanes[gone].window.is_open
                resolver.hosts = set(HOSTS[:2])
                await served.until(lambda _: lanes[gone].window.is_open)

            await stream_all(served, long_requests(4, tokens=500), come_and_go)
            assert len((await served.info()).targets) == 2
    finally:
        for target in targets:
            await target.stop()


async def test_no_address_is_known_yet() -> None:
    target, port = slow_target(), free_port()
    resolver = Resolver()
    resolver.hosts = None
    name = f"dns:///targets:{port}"
    with resolving(resolver), mock.patch("serving.free_address", return_value=name):
        async with serving(target, with_draft=False, with_target=False) as served:
            with pytest.raises(grpc.aio.AioRpcError, match=f"no address is known for {name}"):
                await served.stub.Generate(make_request())
            assert not (await served.info()).HasField("target")
            await target.start(f"{HOSTS[0]}:{port}")
            resolver.hosts = {HOSTS[0]}
            await served.until(lambda info: info.target.state == "ready")
            await served.expect(make_request())


# --- Settings


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"target_address": "a:1,a:1"}, "a:1 is listed twice"),
        ({"target_address": "a:1,b"}, "b has no port"),
        ({"target_address": ","}, "no address is given"),
        ({"target_address": "a:1", "target_standby_address": "a:1"}, "must not be target_address"),
        ({"target_address": "a:1,b:1", "target_standby_address": "c:1"}, "needs a single target_address"),
        ({"target_address": "dns:///a:1", "target_standby_address": "c:1"}, "needs a single target_address"),
    ],
)
def test_bad_addresses_are_refused(settings: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValidationError, match=problem):
        CoordinatorSettings(**settings)


def test_addresses_are_separated_by_commas() -> None:
    assert CoordinatorSettings(target_address="a:1, b:2").target_addresses == ["a:1", "b:2"]
    assert CoordinatorSettings().target_addresses == ["127.0.0.1:50051"]
