"""Pending releases: bounded, and only of sequences that the worker's process has seen."""

import asyncio
from typing import Any

import grpc
import pytest
from replaced_targets import Balanced, ServiceTarget
from serving import PATIENCE_SECONDS, RecordingTarget, make_request, serving

from coordinator.prompts.tokenizer_pool import TokenizerPool
from coordinator.workers.releases import MAX_PENDING, Releases
from coordinator.workers.target_link import TargetLink
from specpool.protocol.codec import MAX_RELEASED, read_release
from specpool.rpc.security.channel import Connector
from specpool.testing import FakeDraft, FakeTarget
from specpool.v1 import common_pb2


class ReleaseLog:
    """A worker that may be away."""

    def __init__(self) -> None:
        self.sent: list[list[int] | None] = []
        self.is_up = True

    async def __call__(self, sequence_ids: list[int] | None) -> bool:
        self.sent.append(sequence_ids)
        return self.is_up


async def test_only_seen_sequences_are_released_once() -> None:
    worker = ReleaseLog()
    releases = Releases(worker)
    releases.see([1, 2, 3])
    releases.add([2, 4])
    worker.is_up = False
    assert not await releases.send()
    releases.add([2, 3])
    worker.is_up = True
    assert await releases.send()
    assert await releases.send()
    assert worker.sent == [[2], [2, 3]]
    releases.add([1])
    releases.forget()
    assert not releases.are_due


async def test_a_release_in_flight_is_not_due_again() -> None:
    """The second one could free the new slot of a preempted sequence that is back."""
    dues = []

    async def send(_: list[int] | None) -> bool:
        dues.append(releases.are_due)
        return False

    releases = Releases(send)
    releases.see([1])
    releases.add([1])
    assert releases.are_due
    assert not await releases.send()
    assert dues == [False]
    assert releases.are_due


async def test_release_that_a_round_in_flight_may_undo_is_repeated() -> None:
    """A preempted sequence returns while the release of its old slot waits for earlier calls."""
    worker = ReleaseLog()
    releases = Releases(worker)
    with releases.in_round([1, 2]):
        with releases.in_round([1]):
            pass
        releases.add([1, 2])
        assert await releases.send()
    releases.add([1])
    releases.add([1])
    assert await releases.send()
    assert worker.sent == [[1, 2], [1]]


async def test_a_sequence_released_again_during_a_send_is_sent_again() -> None:
    """It was back in between: the first release may have reached the worker before its new slot was taken."""
    sent: list[list[int] | None] = []
    gate = asyncio.Event()

    async def send(ids: list[int] | None) -> bool:
        sent.append(ids)
        if len(sent) == 1:
            await gate.wait()
        return True

    releases = Releases(send)
    releases.see([1])
    releases.add([1])
    releases.send_soon()
    await asyncio.sleep(0)  # the send begins
    with releases.in_round([1]):  # back, and served after the release
        pass
    releases.add([1])
    releases.send_soon()
    gate.set()
    sending = releases._sending
    assert sending is not None
    await sending
    assert sent == [[1], [1]]


async def test_too_many_releases_become_one_of_all_sequences() -> None:
    worker = ReleaseLog()
    releases = Releases(worker)
    for start in range(0, MAX_RELEASED + 100, 1000):
        ids = range(start, start + 1000)
        releases.see(ids)
        releases.add(ids)
        assert len(releases._pending) <= MAX_PENDING
    assert await releases.send()
    (first,) = worker.sent
    assert first is None
    releases.see([5])
    releases.add([5])
    assert await releases.send()
    assert worker.sent[1:] == [[5]]
    assert not releases.are_due


class StrictDraft(FakeDraft):
    """Refuses what a real worker refuses."""

    async def Release(self, request: common_pb2.ReleaseRequest, context: Any) -> common_pb2.ReleaseResponse:
        read_release(request)
        return await super().Release(request, context)


async def test_draft_recovers_from_a_million_releases() -> None:
    """The draft worker is out of reach, but keeps its caches."""
    target = FakeTarget()
    async with serving(target, StrictDraft(target)) as served:
        await served.expect(make_request())
        link = served.draft_link
        link._back_off("told to back off")
        link._releases.see(range(MAX_RELEASED + 100))
        link.release_soon(range(MAX_RELEASED + 100))
        served.draft.caches[link._coordinator_id, 7] = [1]
        await served.until_ready()
        await served.until_idle()
        assert (await served.expect(make_request())).speculative_decoding.num_draft_tokens > 0


@pytest.mark.parametrize("is_same", [True, False])
async def test_releases_do_not_count_for_another_process(is_same: bool, tokenizers: TokenizerPool) -> None:
    target = FakeTarget()
    link = TargetLink(Connector(await target.start()), "c", PATIENCE_SECONDS, tokenizers)
    try:
        await link._probe()
        link._releases.see([1])
        if not is_same:
            target.instance_id = "another process"
        assert await link.release([1]) == is_same
        assert link.is_ready == is_same
        await link._probe()
        assert link.is_ready
        assert await link.release([])
        assert not link._releases.are_due
    finally:
        await link.close()
        await target.stop()


async def test_new_process_frees_what_it_kept() -> None:
    """The address may lead back to an earlier process."""
    target, other = ServiceTarget(), FakeTarget()
    async with serving(target, with_draft=False) as served:
        await served.expect(make_request())
        key = (served.process.coordinator.target._coordinator_id, 77)
        other.caches[key] = [1]
        await target.replace(other)
        await served.expect(make_request())  # an idle link notices nothing
        assert key not in other.caches


async def test_a_process_that_returns_still_gets_its_releases(tokenizers: TokenizerPool) -> None:
    """Another process at its address has not confirmed that it freed everything."""

    class Unwilling(RecordingTarget):
        async def Release(self, request: common_pb2.ReleaseRequest, context: Any) -> common_pb2.ReleaseResponse:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "busy")
            raise AssertionError

    first = RecordingTarget()
    target = Balanced([first, Unwilling()], chosen=0)
    link = TargetLink(Connector(await target.start()), "c", PATIENCE_SECONDS, tokenizers)
    try:
        await link._probe()
        link._releases.see([1])
        first.caches["c", 1] = [1]
        target.switch(1)
        link._back_off("the connection broke")
        await link._probe()
        assert not link.is_ready
        target.switch(0)
        await link._probe()
        assert link.is_ready
        assert await link.release([1])
        assert not first.caches
    finally:
        await link.close()
        await target.stop()
