"""Sequences share a small KV cache and preempt each other, over real sockets. The tokens stay the same."""

import asyncio
import random
from collections import Counter

import grpc
import pytest
from serving import DEFAULTS, RecordingDraft, RecordingTarget, check_tokens, make_request, serving

from coordinator.config.settings import CoordinatorSettings
from coordinator.server import CoordinatorServer
from specpool.v1 import generation_pb2 as pb
from specpool.v1.generation_pb2_grpc import GenerationServiceStub

ANNE, BOB = (("client", "anne"),), (("client", "bob"),)


pytestmark = pytest.mark.usefixtures("clients_by_metadata")


@pytest.mark.parametrize(("overlap", "is_recurrent"), [("on", False), ("on", True), ("off", False), ("off", True)])
async def test_tokens_are_equal_while_sequences_grow_and_are_preempted(overlap: str, is_recurrent: bool) -> None:
    chance = random.Random(1)
    target = RecordingTarget(kv_positions=768, max_model_len=512, is_recurrent=is_recurrent)
    draft = RecordingDraft(target, kv_positions=512, max_model_len=512, is_recurrent=is_recurrent)
    requests = [make_request([i, 2, 3] * chance.randint(1, 40), chance.choice([4, 40, 380])) for i in range(12)]
    async with serving(target, draft, overlap=overlap) as served:
        calls = [served.stub.Generate(r, metadata=(ANNE, BOB)[i % 2]) for i, r in enumerate(requests)]
        answers = await asyncio.gather(*calls)
        for request, answer in zip(requests, answers, strict=True):
            check_tokens(target, request, answer)
        await served.until_idle()
    contacts = Counter(item.sequence_id for each in target.requests for item in each.items if item.HasField("sampling"))
    assert max(contacts.values()) > 1, "nothing was preempted"
    assert max(target.held) >= 2


async def test_samples_prefill_their_prompt_once() -> None:
    """Eight copies of the prompt would not fit."""
    target = RecordingTarget(kv_positions=768, max_model_len=768)
    request = make_request([i % 250 for i in range(500)], 16, n=8, ignore_eos=True, temperature=1)
    async with serving(target, with_draft=False) as served:
        answer = await served.stub.Generate(request)
        await served.until_idle()
    assert [sample.usage.cached_tokens for sample in (answer, *answer.other_samples)] == [0, *[496] * 7]
    assert max(target.held) == 8
    items = [item for each in target.requests for item in each.items]
    assert sum(len(item.token_ids) - item.expected_prefix_length for item in items) < 500 + 8 * 4 + 8 * 16


async def test_a_prefix_is_found_until_the_target_evicts_it() -> None:
    target = RecordingTarget(kv_positions=512, max_model_len=512)
    async with serving(target, with_draft=False) as served:

        async def cached(prompt: list[int]) -> int:
            response = await served.stub.Generate(make_request(prompt, 4, ignore_eos=True))
            return response.usage.cached_tokens

        shared, other = [i % 250 for i in range(400)], [7] * 400
        assert [await cached([*shared, 1]), await cached([*shared, 2])] == [0, 400]
        assert await cached(other) == 0
        assert 0 < await cached([*shared, 3]) < 400
    contacts = Counter(item.sequence_id for each in target.requests for item in each.items if item.HasField("sampling"))
    assert set(contacts.values()) == {1}, "the target has reported the pages"


async def test_a_short_request_does_not_wait_for_a_long_answer_that_fills_the_cache() -> None:
    target = RecordingTarget(kv_positions=512, max_model_len=512)
    order: list[str] = []

    async def run(name: str, request: pb.GenerateRequest, client: object) -> None:
        check_tokens(target, request, await served.stub.Generate(request, metadata=client))
        order.append(name)

    async with serving(target, with_draft=False) as served:
        long = asyncio.create_task(run("long", make_request([1] * 10, 500, ignore_eos=True), ANNE))
        await served.until(lambda info: info.counters.completion_tokens > 440)
        await run("short", make_request([2] * 10, 1, ignore_eos=True), BOB)
        await long
        await served.until_idle()
        assert served.process.coordinator.lanes.first.window.kv_usage == 0
    assert order == ["short", "long"]


async def test_two_coordinators_share_a_worker_that_holds_one_long_answer() -> None:
    target = RecordingTarget(kv_positions=512, max_model_len=512)
    requests = [make_request([i] * 10, 400, ignore_eos=True) for i in range(2)]
    async with serving(target, with_draft=False) as one:
        settings = CoordinatorSettings(**DEFAULTS, target_address=one.target_address)
        other = CoordinatorServer(settings)
        async with grpc.aio.insecure_channel(f"127.0.0.1:{await other.start()}") as channel:
            await other.coordinator.target.wait_ready()
            stubs = one.stub, GenerationServiceStub(channel)
            calls = [stub.Generate(request) for stub, request in zip(stubs, requests, strict=True)]
            for request, answer in zip(requests, await asyncio.gather(*calls), strict=True):
                check_tokens(target, request, answer)
        other.server.stop()
        await other.wait_stopped()
