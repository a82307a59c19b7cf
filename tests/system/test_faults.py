"""Workers that lose caches, fail, hang, restart or never start cost time, but change no token."""

import asyncio
from collections.abc import Callable
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc import StatusCode
from grpc_health.v1 import health_pb2
from serving import (
    RecordingDraft,
    RecordingTarget,
    Serving,
    check_tokens,
    detail_of,
    make_request,
    serving,
    stream,
)

from coordinator.scheduling.round import Round
from coordinator.scheduling.sequence import GenerationRequest, Sequence
from specpool.protocol.worker_info import WorkerInfo
from specpool.v1 import generation_pb2 as pb

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


async def expect_all(served: Serving, requests: list[pb.GenerateRequest]) -> list[pb.GenerateResponse]:
    """Send all requests at once, and assert plain tokens for each."""
    return await asyncio.gather(*(served.expect(request) for request in requests))


def some_requests(number: int = 6, max_tokens: int = 40, k: int | None = None) -> list[pb.GenerateRequest]:
    return [make_request(range(i, 3 * i + 1), max_tokens, k) for i in range(number)]


async def after_rounds(worker: RecordingTarget | RecordingDraft, rounds: int, act: Callable[[], Any]) -> Any:
    """Call `act` after `rounds` more calls of the worker. Return its result."""
    end = worker.calls + rounds
    async with asyncio.timeout(20):
        while worker.calls < end:  # noqa: ASYNC110 - the fakes announce nothing
            await asyncio.sleep(0.001)
    return await act()


async def test_requests_wait_for_a_restarting_target() -> None:
    async with serving() as served:
        await served.target.stop()
        info = await served.until(lambda info: info.target.state == "connecting")
        assert info.target.reason
        assert not info.target.HasField("load")
        assert await served.status() == NOT_SERVING
        waiting = asyncio.ensure_future(served.expect(make_request()))
        await served.until(lambda info: info.queued == 1)
        await served.target.start(served.target_address)
        await waiting
        assert await served.status() == SERVING


async def test_restart_of_the_draft_costs_no_token() -> None:
    async with serving() as served:

        async def stop() -> None:
            await served.draft.stop()

        running = asyncio.ensure_future(expect_all(served, some_requests(4, max_tokens=300)))
        await after_rounds(served.draft, 5, stop)
        await served.until(lambda info: info.draft.state != "ready")
        await running
        await served.draft.start(served.draft_address)
        await served.until(lambda info: info.draft.state == "ready")
        response = await served.expect(make_request())
        assert response.speculative_decoding.num_draft_tokens > 0
        await served.until_idle()


@pytest.mark.parametrize("code", [StatusCode.INTERNAL, StatusCode.DEADLINE_EXCEEDED])
async def test_failing_draft_costs_no_token_and_rejoins(code: StatusCode) -> None:
    async with serving() as served:
        served.draft.fail_next = [code]
        await expect_all(served, some_requests())
        assert served.draft.fail_next == []
        await served.until(lambda info: info.draft.state == "ready")
        response = await served.expect(make_request())
        assert response.speculative_decoding.num_draft_tokens > 0


async def test_backoff_after_repeated_failures_of_the_draft() -> None:
    async with serving(probe_seconds=1.0) as served:
        served.draft.fail_next = [StatusCode.INTERNAL] * 10_000
        responses = await expect_all(served, some_requests())
        assert all(response.speculative_decoding.num_draft_tokens == 0 for response in responses)
        info = await served.info()
        assert served.draft.calls < info.counters.rounds / 2


async def test_slow_draft_backs_off_and_rejoins(caplog: pytest.LogCaptureFixture) -> None:
    target = RecordingTarget()
    draft = RecordingDraft(target, delay=3600)
    async with serving(target, draft, draft_timeout_seconds=0.05, probe_seconds=1.0) as served:
        running = asyncio.ensure_future(expect_all(served, some_requests(max_tokens=100)))
        await served.until(lambda _: "is resting: DEADLINE_EXCEEDED" in caplog.text)
        await running
        draft.delay = 0.0
        await served.until(lambda info: info.draft.state == "ready")
        response = await served.expect(make_request())
        assert response.speculative_decoding.num_draft_tokens > 0


async def test_hanging_draft_does_not_block_queued_requests() -> None:
    target = RecordingTarget()
    draft = RecordingDraft(target, delay=3600)
    async with serving(target, draft, draft_timeout_seconds=1.5, probe_seconds=60.0, max_num_seqs=1) as served:
        async with asyncio.timeout(15):
            await expect_all(served, some_requests(20, max_tokens=5))
        assert draft.releases <= 1


async def test_failed_round_of_the_target_is_retried() -> None:
    async with serving() as served:
        served.target.fail_next = [StatusCode.INTERNAL]
        await served.expect(make_request())
        served.target.fail_next = [StatusCode.INTERNAL]
        await expect_all(served, some_requests())
        assert "error" not in (await served.info()).counters.finished


@pytest.mark.parametrize("code", [StatusCode.UNAVAILABLE, StatusCode.CANCELLED])
async def test_unavailable_target_is_retried(code: StatusCode) -> None:
    async with serving() as served:
        served.target.fail_next = [code] * 3
        await expect_all(served, some_requests())


async def test_coordinator_bug_fails_its_requests_and_not_the_service(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with serving() as served:
        with monkeypatch.context() as broken:
            broken.setattr("coordinator.scheduling.round.Round.verify_items", lambda _: 1 / 0)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await served.stub.Generate(make_request())
        assert caught.value.code() is StatusCode.INTERNAL
        assert "division" not in caught.value.details()
        assert "ZeroDivisionError" in caplog.text
        await served.expect(make_request())
        await served.until_idle()


async def test_draft_is_used_only_with_the_right_tokenizer() -> None:
    target = RecordingTarget()
    draft = RecordingDraft(target, fingerprint="other")
    async with serving(target, draft, wait_for_draft=False) as served:
        info = await served.until(lambda info: info.draft.state == "refused")
        assert "tokenizer" in info.draft.reason
        response = await served.expect(make_request())
        assert response.speculative_decoding.num_draft_tokens == 0
        await served.until_idle()
        assert (draft.requests, draft.releases) == ([], 0)
        draft.fingerprint = "fake"
        await served.until(lambda info: info.draft.state == "ready")
        assert (await served.expect(make_request())).speculative_decoding.num_draft_tokens > 0


async def test_sequence_with_tokens_unknown_to_the_draft_gets_no_draft() -> None:
    """One such sequence would make the draft worker refuse the whole round."""
    round_ = Round(1, [sequence := Sequence(1, GenerationRequest("a", (5, 900), 9, frozenset(), 3))], 64)
    sequence.target.commit(1)
    assert round_.propose_items(lambda _: WorkerInfo(max_model_len=1000, vocab_size=900)) == []
    (item,) = round_.propose_items(lambda _: WorkerInfo(max_model_len=1000, vocab_size=901))
    assert item.num_draft_tokens == 3


async def test_window_does_not_exceed_the_targets_slots() -> None:
    async with serving(RecordingTarget(slots=3), max_num_seqs=8) as served:
        await expect_all(served, some_requests(12))
        info = await served.until_idle()
        assert info.max_num_seqs == 3
        assert max(served.target.held) == 3
        assert info.counters.cache_misses == 0


async def test_target_returning_with_fewer_slots_serves_all() -> None:
    async with serving(RecordingTarget(slots=6)) as served:
        running = asyncio.ensure_future(expect_all(served, some_requests(6, max_tokens=100)))

        async def restart() -> None:
            await served.target.stop()
            served.target.slots = 2
            await served.target.start(served.target_address)

        await after_rounds(served.target, 5, restart)
        await running


async def test_draft_with_few_slots_drafts_for_few_sequences() -> None:
    target = RecordingTarget()
    draft = RecordingDraft(target, slots=2)
    async with serving(target, draft, max_num_seqs=6) as served:
        responses = await expect_all(served, some_requests(12))
        assert sum(response.speculative_decoding.num_draft_tokens for response in responses) > 0
        await served.until_idle()


async def test_draft_is_not_asked_beyond_its_maximum_length() -> None:
    target = RecordingTarget()
    draft = RecordingDraft(target, acceptance=1.0, max_model_len=32)
    async with serving(target, draft) as served:
        await served.expect(make_request([1] * 10, 60, k=4))
        await served.expect(make_request([2] * 40, 20, k=4))
        items = [item for request in draft.requests for item in request.items]
        ends = [item.base_length + len(item.token_ids) + max(0, item.num_draft_tokens - 1) for item in items]
        assert 28 <= max(ends) <= 32


async def test_coordinator_reports_a_missing_target_and_serves_once_it_exists() -> None:
    async with serving(with_target=False) as served:
        assert await served.status() == NOT_SERVING
        for call in (
            served.stub.Generate(make_request()),
            served.stub.GetModelInfo(pb.GetModelInfoRequest()),
            stream(served, make_request()),
        ):
            with pytest.raises(grpc.aio.AioRpcError, match=served.target_address) as caught:
                await call
            assert caught.value.code() is StatusCode.UNAVAILABLE
        info = await served.info()
        assert (info.target.state, info.draft.state) == ("connecting", "connecting")
        await served.target.start(served.target_address)
        await served.until_ready()
        assert await served.status() == SERVING
        await served.expect(make_request())


async def test_full_queue_refuses_with_retry_info() -> None:
    async with serving(max_num_seqs=1, queue_size=2) as served:
        served.target.open.clear()
        accepted = [asyncio.ensure_future(served.expect(make_request([i]))) for i in range(3)]
        await served.until(lambda info: (info.running, info.queued) == (1, 2))
        for call in (served.stub.Generate(make_request()), stream(served, make_request())):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call
            assert caught.value.code() is StatusCode.RESOURCE_EXHAUSTED
            assert detail_of(caught.value, error_details_pb2.RetryInfo).retry_delay.ToMilliseconds() == 1000
        served.target.open.set()
        await asyncio.gather(*accepted)
        assert (await served.until_idle()).counters.requests == 3


async def test_burst_within_the_window_needs_no_queue() -> None:
    async with serving(max_num_seqs=8, queue_size=0) as served:
        await expect_all(served, some_requests(8))


async def test_coordinator_stops_after_a_fatal_error(monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving() as served:
        monkeypatch.setattr(served.process.coordinator.lanes.first.window, "settle", lambda *_: 1 / 0)
        served.process.coordinator.queue.wake()
        with pytest.raises(ExceptionGroup) as caught:
            await served.process.wait_stopped()
        assert caught.group_contains(ZeroDivisionError)
        # Replace the failed task, which would fail the shutdown again.
        served.process._running = asyncio.ensure_future(asyncio.sleep(0))


async def test_lost_shared_prefix_costs_a_cache_miss() -> None:
    """The window groups a waiting sequence by a prefix that a worker may have lost since."""
    settings = {"policy": "exspec", "prefer_group": "oldest", "max_batch_size": 2, "max_num_seqs": 8}
    async with serving(RecordingTarget(), **settings) as served:
        requests = [make_request([i] * 40, 24, temperature=1.0, n=4) for i in range(1, 4)]
        calls = [served.stub.Generate(request) for request in requests]
        for calls_so_far in (4, 8, 12, 16):
            await served.until(lambda _, calls=calls_so_far: served.target.calls >= calls)
            served.draft.forget()
            served.target.forget()
        for request, response in zip(requests, await asyncio.gather(*calls), strict=True):
            for sample in (response, *response.other_samples):
                check_tokens(served.target, request, sample)
        await served.until_idle()
