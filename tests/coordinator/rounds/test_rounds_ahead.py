"""Rounds sent before the last one is answered: the tokens of plain decoding, whatever happens to either round."""

import asyncio
import random
from typing import Any

import grpc
import pytest
from mixes import branches_only
from serving import RecordingDraft, RecordingTarget, make_request, serving

from coordinator.scheduling.round import Round
from specpool.v1 import target_worker_pb2

SLOW_PASS_SECONDS = 0.02
"""Longer than drafting takes."""


def continuing(target: RecordingTarget) -> list[target_worker_pb2.VerifyItem]:
    """Items that were sent before the result that they continue."""
    return [item for request in target.requests for item in request.items if item.HasField("after_round_id")]


@pytest.mark.parametrize("is_recurrent", [False, True])
async def test_plain_rounds_are_sent_ahead(is_recurrent: bool) -> None:
    target = RecordingTarget(is_recurrent=is_recurrent)
    async with serving(target, with_draft=False) as served:
        await asyncio.gather(*(served.expect(make_request([i, 1], 50, k=0)) for i in range(4)))
        info = await served.until_idle()
    assert len(continuing(target)) > 100
    assert info.counters.completion_tokens == 200
    assert info.counters.cache_misses == target.missing_states == 0


async def test_a_stopped_sequence_drops_its_round_ahead() -> None:
    target = RecordingTarget(eos_rate=0.05)
    async with serving(target, with_draft=False) as served:
        requests = [make_request([i, 2], 200, k=0) for i in range(12)]
        responses = await asyncio.gather(*(served.expect(request) for request in requests))
        await served.until_idle()
    assert {response.finish_reason for response in responses} == {"stop"}


async def test_prompt_chunks_are_sent_ahead() -> None:
    target = RecordingTarget()
    async with serving(target, with_draft=False, prefill_tokens=16) as served:
        await served.expect(make_request([7] * 100, 5, k=0))
    chunks = [item for request in target.requests for item in request.items if item.prefill_only]
    assert [item.base_length for item in chunks] == [16 * i for i in range(len(chunks))]
    assert sum(item.HasField("sampling") for item in chunks) == 1, "only the first contact has parameters"


@pytest.mark.parametrize("policy", ["eqspec", "exspec"])
async def test_groups_of_equal_length_wait_for_results(policy: str) -> None:
    target = RecordingTarget()
    async with serving(target, with_draft=False, policy=policy) as served:
        await asyncio.gather(*(served.expect(make_request([i, 1], 20, k=0)) for i in range(3)))
    assert not continuing(target)


class Unreliable(RecordingTarget):
    """Loses caches, answers garbage or fails, some rounds each."""

    def __init__(self, rate: float, faults: tuple[str, ...], **knobs: Any) -> None:
        super().__init__(**knobs)
        self._rate, self._faults, self._random = rate, faults, random.Random(1)

    async def Verify(self, request: Any, context: Any) -> Any:
        fault = self._random.choice(self._faults) if self._random.random() < self._rate else ""
        if fault == "forget":
            self.forget()
        if fault == "forget one" and self.caches:
            self.caches.pop(self._random.choice(list(self.caches)))
        if fault == "refuse":
            self.fail_next.append(grpc.StatusCode.INVALID_ARGUMENT)
        if fault == "unavailable":
            await context.abort(grpc.StatusCode.UNAVAILABLE, "told to fail")
        response = await super().Verify(request, context)
        if fault == "wrong round":
            response.round_id += 1
        if fault == "wrong length" and response.results:
            response.results[0].cached_length += 1
        if fault == "stale":
            for result in response.results:
                result.Clear()
            for result, item in zip(response.results, request.items, strict=True):
                result.sequence_id, result.status = item.sequence_id, 4
        return response


@pytest.mark.parametrize("fault", ["forget one", "refuse", "unavailable", "wrong round", "wrong length", "stale"])
@pytest.mark.parametrize("is_recurrent", [False, True])
async def test_faults_cost_no_token(fault: str, is_recurrent: bool) -> None:
    target = Unreliable(0.08, (fault,), is_recurrent=is_recurrent)
    async with serving(target, with_draft=False) as served:
        prompts = [[i, 3, 4] for i in range(6)]
        await asyncio.gather(*(served.expect(make_request(prompt, 40, k=0)) for prompt in prompts))
        await served.until_idle()


@pytest.mark.parametrize("is_recurrent", [False, True])
async def test_branches_are_sent_before_the_outcome_is_known(is_recurrent: bool) -> None:
    target = RecordingTarget(pass_seconds=lambda rows: SLOW_PASS_SECONDS, is_recurrent=is_recurrent)
    draft = RecordingDraft(target, acceptance=0.9, is_recurrent=is_recurrent)
    with branches_only():
        async with serving(target, draft, overlap="on") as served:
            await asyncio.gather(*(served.expect(make_request([i, 1], 40, k=3)) for i in range(3)))
            info = await served.until_idle()
    assert any(item.branches for item in continuing(target))
    assert info.counters.accepted_draft_tokens > 40
    assert info.counters.cache_misses == target.missing_states == draft.missing_states == 0


@pytest.mark.parametrize("fault", ["forget", "refuse", "wrong round"])
async def test_faults_cost_no_token_while_branches_wait_at_the_target(fault: str) -> None:
    target = Unreliable(0.08, (fault,), pass_seconds=lambda rows: 0.005)
    with branches_only():
        async with serving(target, RecordingDraft(target, acceptance=0.9), overlap="on") as served:
            prompts = [[i, 3, 4] for i in range(6)]
            await asyncio.gather(*(served.expect(make_request(prompt, 40, k=3)) for prompt in prompts))
            await served.until_idle()


async def test_an_abort_between_a_commit_and_its_publication_loses_no_token(monkeypatch: pytest.MonkeyPatch) -> None:
    commit, target = Round.commit, RecordingTarget()
    async with serving(target, with_draft=False) as served:

        def commit_and_abort(self: Round, verdicts: Any) -> Any:
            commits = commit(self, verdicts)
            for sequence in (each.sequence for each in commits if each.sequence.num_generated == 5):
                abort = served.process.coordinator.abort
                asyncio.get_running_loop().call_soon(abort, sequence.request.client, sequence.request.request_id)
            return commits

        monkeypatch.setattr(Round, "commit", commit_and_abort)
        response = await served.stub.Generate(make_request([1, 2], 100, k=0, request_id="aborted"))
        assert (response.finish_reason, len(response.token_ids)) == ("abort", 5)
        assert list(response.token_ids) == target.continuation([1, 2], 5)
        assert (await served.until_idle()).counters.finished == {"abort": 1}


async def test_cancelled_requests_leave_nothing_behind() -> None:
    """Their round ahead may still be on its way to the worker when the slot is released."""
    target = RecordingTarget()
    async with serving(target, with_draft=False, max_num_seqs=4) as served:
        stays = [asyncio.ensure_future(served.expect(make_request([i, 9], 150, k=0))) for i in range(2)]
        for i in range(20):
            call = served.stub.GenerateStream(make_request([i, 8], 150, k=0))
            await call.read()
            call.cancel()
        await asyncio.gather(*stays)
        info = await served.until_idle()
    assert info.counters.cache_misses == 0


async def test_newcomers_do_not_wait_for_a_result() -> None:
    """Their first round may join the one that waits at the worker. Then they run with the others."""
    target = RecordingTarget(pass_seconds=lambda rows: 0.005)
    async with serving(target, with_draft=False) as served:
        stays = [asyncio.ensure_future(served.expect(make_request([i, 9], 120, k=0))) for i in range(2)]
        await served.until(lambda info: info.counters.rounds > 5)
        newcomers = [[i, 8] for i in range(4)]
        for prompt in newcomers:
            await served.expect(make_request(prompt, 3, k=0))
        await asyncio.gather(*stays)
        info = await served.until_idle()
    joining = [request for request in target.requests if request.may_join]
    assert joining, "no newcomer came while two rounds were in flight"
    assert all(item.HasField("sampling") for request in joining for item in request.items)
    assert info.counters.cache_misses == 0
    assert max(len(request.items) for request in target.requests) == 3, "newcomers never ran with the others"


async def test_sequences_that_arrive_apart_share_their_rounds() -> None:
    """Groups that took turns would need a pass each."""
    target = RecordingTarget(pass_seconds=lambda rows: 0.003)
    async with serving(target, with_draft=False) as served:
        running = []
        for i in range(8):
            running.append(asyncio.ensure_future(served.expect(make_request([i, 7], 80 - 4 * i, k=0))))
            await served.until(lambda info, started=i: info.running > started)
        await asyncio.gather(*running)
    sizes = [len(request.items) for request in target.requests]
    assert sizes.count(8) > 20, sizes


async def test_newcomers_join_a_group_that_drafts() -> None:
    """A group of their own would double the passes."""
    target = RecordingTarget(pass_seconds=lambda rows: 0.005)
    async with serving(target, overlap="off") as served:
        stays = [asyncio.ensure_future(served.expect(make_request([i, 9], 100, k=3))) for i in range(2)]
        await served.until(lambda info: info.counters.rounds > 5)
        await asyncio.gather(*(served.expect(make_request([i, 8], 60, k=3)) for i in range(2)))
        await asyncio.gather(*stays)
    assert sum(len(request.items) == 4 for request in target.requests) > 10
