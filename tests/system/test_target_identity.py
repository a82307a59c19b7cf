"""A target that another process replaces between two rounds: no response mixes tokens of two models."""

import asyncio
from typing import Any

import grpc
import pytest
from replaced_targets import Balanced, OtherTarget, ServiceTarget
from secure_service import until
from serving import RecordingDraft, RecordingTarget, Serving, expected_tokens, make_request, serving

from coordinator.rounds import proposing
from coordinator.rounds.proposing import Proposing
from coordinator.workers.interface import MismatchError
from specpool.drafting.branching import Branching, BranchPlan
from specpool.testing import FakeDraft, FakeTarget
from specpool.v1 import generation_pb2 as pb

NO_PROBE_SECONDS = 3600.0
NUM_REQUESTS = 36


def slow(rows: int) -> float:
    return 0.002


def mixed_requests(count: int = NUM_REQUESTS, **params: Any) -> list[pb.GenerateRequest]:
    """Requests of different lengths."""
    return [make_request([i, 2], 10 + 10 * (i % 8), ignore_eos=True, **params) for i in range(count)]


async def answers(served: Serving, requests: list[pb.GenerateRequest]) -> list[Any]:
    """Responses and errors."""
    calls = [served.stub.Generate(request) for request in requests]
    return await asyncio.gather(*calls, return_exceptions=True)


def check_unmixed(requests: list[pb.GenerateRequest], ended: list[Any], *targets: FakeTarget) -> list[FakeTarget]:
    """Assert that each response is that of one target, and each error temporary. Return these targets."""
    sources = []
    for request, end in zip(requests, ended, strict=True):
        if isinstance(end, pb.GenerateResponse):
            sources += [target for target in targets if list(end.token_ids) == expected_tokens(target, request)][:1]
            assert sources
        else:
            assert end.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED), end
    assert len(sources) == sum(isinstance(end, pb.GenerateResponse) for end in ended), "a response mixes two models"
    return sources


async def test_target_with_other_fingerprints_stops_the_coordinator() -> None:
    target, other = ServiceTarget(pass_seconds=slow), OtherTarget(pass_seconds=slow)
    with pytest.raises(MismatchError, match="fingerprint"):  # noqa: PT012 - raised when the service ends
        async with serving(target, probe_seconds=NO_PROBE_SECONDS) as served:
            stopped = asyncio.create_task(served.process.wait_stopped())
            requests = mixed_requests()
            running = asyncio.create_task(answers(served, requests))
            await served.until(lambda info: info.counters.completion_tokens > 200)
            await target.replace(other)
            assert len(check_unmixed(requests, await running, target)) < NUM_REQUESTS
            await stopped


async def test_target_with_the_same_fingerprints_loses_nothing() -> None:
    target, same = ServiceTarget(pass_seconds=slow), FakeTarget(pass_seconds=slow)
    async with serving(target, probe_seconds=NO_PROBE_SECONDS) as served:
        requests = mixed_requests()
        running = asyncio.create_task(answers(served, requests))
        await served.until(lambda info: info.counters.completion_tokens > 200)
        await target.replace(same)
        assert check_unmixed(requests, await running, target) == [target] * NUM_REQUESTS
        assert same.calls > 10
        assert (await served.info()).counters.cache_misses == 0


@pytest.mark.slow
async def test_two_targets_behind_one_address() -> None:
    """A load balancer chooses a process for each call."""
    members = [RecordingTarget(), RecordingTarget()]
    target = Balanced(members)
    async with serving(target, with_draft=False) as served:
        requests = mixed_requests(8)
        while not all(member.calls for member in members):
            assert len(check_unmixed(requests, await answers(served, requests), *members)) == 8


async def test_caches_of_an_earlier_process_are_not_used_again() -> None:
    """The address leads to another process and back."""
    target = Balanced([RecordingTarget(pass_seconds=slow), RecordingTarget(pass_seconds=slow)], chosen=0)
    async with serving(target, with_draft=False, max_num_seqs=2) as served:
        requests = mixed_requests(8)
        running = asyncio.create_task(answers(served, requests))
        for tokens, chosen in ((100, 1), (200, 0)):
            await served.until(lambda info, tokens=tokens: info.counters.completion_tokens > tokens)
            target.switch(chosen)
        assert len(check_unmixed(requests, await running, target)) == 8
        first, second = target.members
        assert sum(not item.base_length for request in first.requests for item in request.items) > 8 - 2
        await served.until(lambda info: info.running == len(first.caches) == 0)
        assert second.caches, "the second process is out of reach"
        target.switch(1)
        await served.expect(make_request())
        await served.until(lambda info: info.running == len(second.caches) == 0)


@pytest.mark.parametrize("wrong", ["", "another process"])
async def test_draft_answers_of_another_process_are_not_used(wrong: str, caplog: pytest.LogCaptureFixture) -> None:
    class Restarted(RecordingDraft):
        async def Propose(self, request: Any, context: Any) -> Any:
            response = await super().Propose(request, context)
            response.instance_id = wrong
            return response

    target = RecordingTarget()
    draft: FakeDraft = Restarted(target)
    async with serving(target, draft) as served:
        response = await served.expect(make_request())
        assert not response.speculative_decoding.num_draft_tokens
        assert f"instance {wrong or 'none'} responded" in caplog.text


async def test_a_round_of_a_replaced_target_is_discarded(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has verified the end of the prompt, and another process takes over before the round has ended."""
    target, other = ServiceTarget(), FakeTarget()
    draft = RecordingDraft(target, device="other")
    async with serving(target, draft) as served:
        await served.expect(make_request())
        link, request = served.process.coordinator.target, make_request([3], 20, ignore_eos=True)
        replaced = asyncio.Event()

        async def outlast_the_target(*_: Any) -> None:
            if not replaced.is_set():
                replaced.set()
                await asyncio.sleep(0.05)  # until the target has answered
                instance_id = link.instance_id
                await target.replace(other)
                link._back_off("a probe failed")
                await until(lambda: link.instance_id != instance_id)

        monkeypatch.setattr(Proposing, "_draft_ahead", outlast_the_target)
        monkeypatch.setattr(Proposing, "_can_overlap", True)
        monkeypatch.setattr(proposing, "MAX_LATENESS", 1e6)
        monkeypatch.setattr(Branching, "best", lambda *_: BranchPlan(num_branches=1, length=1, speed=1e9))
        await served.expect(request)
        assert replaced.is_set()
        assert (await served.info()).counters.cache_misses == 0, "the round has committed"
