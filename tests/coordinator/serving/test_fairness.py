"""Several clients of one server: fairness, limits, and isolation."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2
from serving import RecordingTarget, Serving, check_tokens, detail_of, make_request, serving

from specpool.v1 import generation_pb2 as pb

ANNE, BOB = (("client", "anne"),), (("client", "bob"),)


pytestmark = pytest.mark.usefixtures("clients_by_metadata")


@asynccontextmanager
async def held(**settings: Any) -> AsyncIterator[Serving]:
    """A server whose target does not answer until its `open` is set."""
    async with serving(**settings) as served:
        assert isinstance(served.target, RecordingTarget)
        served.target.open.clear()
        yield served


async def submit(
    served: Serving, requests: list[pb.GenerateRequest], client: Any, order: list[str]
) -> list[asyncio.Task[None]]:
    """Start calls that append their ids to `order` when they end; returns once all of them wait or run."""
    before = await served.info()

    async def one(request: pb.GenerateRequest) -> None:
        await served.stub.Generate(request, metadata=client)
        order.append(request.request_id)

    calls = [asyncio.create_task(one(request)) for request in requests]
    more = sum(max(1, request.sampling_params.n) for request in requests)
    total = before.running + before.queued + more
    await served.until(lambda info: info.running + info.queued == total)
    return calls


async def test_many_waiting_requests_delay_another_client_by_one_turn() -> None:
    order: list[str] = []
    async with held(max_num_seqs=2, num_speculative_tokens=0) as served:
        many = [make_request([i], 4, request_id=f"anne {i}") for i in range(100)]
        calls = await submit(served, many, ANNE, order)
        calls += await submit(served, [make_request([7], 4, request_id="bob")], BOB, order)
        served.target.open.set()
        await asyncio.gather(*calls)
        await served.until_idle()
    assert order.index("bob") <= 4


class SlowlyReleasing(RecordingTarget):
    """Target that takes some time to release sequences."""

    async def Release(self, request: Any, context: Any) -> Any:
        await asyncio.sleep(0.05)
        return await super().Release(request, context)


async def test_the_next_round_waits_for_the_slot_of_a_preempted_sequence() -> None:
    target = SlowlyReleasing(slots=4)
    async with serving(target, with_draft=False, max_num_seqs=4) as served:
        (many,) = await submit(served, [make_request([1], 40, temperature=1.0, n=4, ignore_eos=True)], ANNE, [])
        await served.until(lambda info: info.counters.completion_tokens > 8)
        target.open.clear()
        seen = len(target.requests)
        while len(target.requests) == seen:  # noqa: ASYNC110 - the next round arrives over a connection
            await asyncio.sleep(0.01)
        (one,) = await submit(served, [make_request([7, 8], 1)], BOB, [])
        rounds = len(target.requests)
        target.open.set()
        await asyncio.gather(one, many)
    waiting, following = target.requests[rounds : rounds + 2]  # one round has been sent ahead
    assert [7, 8] in [item.token_ids for item in (*waiting.items, *following.items)]


async def test_preempted_sequences_with_rounds_in_flight_keep_their_tokens() -> None:
    target = RecordingTarget(slots=4)
    async with serving(target, with_draft=False, max_num_seqs=4) as served:

        async def expect(request: pb.GenerateRequest, client: Any) -> None:
            check_tokens(target, request, await served.stub.Generate(request, metadata=client))

        many = [asyncio.ensure_future(expect(make_request([i, 6], 120, k=0), ANNE)) for i in range(6)]
        await served.until(lambda info: info.running == 4)
        await asyncio.gather(*(expect(make_request([i, 5], 20, k=0), BOB) for i in range(4)))
        await asyncio.gather(*many)
        await served.until_idle()


async def test_refusals_by_client_and_token_limits_have_a_retry_delay() -> None:
    async with held(max_num_seqs=1, max_requests_per_client=3, queue_tokens=50) as served:
        calls = await submit(served, [make_request([i] * 20, request_id=f"{i}") for i in range(3)], ANNE, [])
        for request, reason in (
            (make_request([1]), "3 samples of this client are in flight, of at most 3"),
            (make_request([1], temperature=1.0, n=3), "3 samples of this client"),
        ):
            with pytest.raises(grpc.aio.AioRpcError, match=reason) as caught:
                await served.stub.Generate(request, metadata=ANNE)
            delay = detail_of(caught.value, error_details_pb2.RetryInfo).retry_delay.ToMilliseconds()
            assert 50 <= delay <= 10_000
        with pytest.raises(grpc.aio.AioRpcError, match=r"sampling_params\.n: 4 exceeds 3") as caught:
            await served.stub.Generate(make_request([1], temperature=1.0, n=4), metadata=BOB)
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        calls += await submit(served, [make_request([1] * 30)], BOB, [])
        with pytest.raises(grpc.aio.AioRpcError, match="70 tokens wait, of at most 50"):
            await served.stub.Generate(make_request([1] * 5), metadata=BOB)
        served.target.open.set()
        await asyncio.gather(*calls)


async def test_clients_can_abort_only_their_own_requests() -> None:
    async with held(max_num_seqs=4) as served:
        calls = [
            asyncio.ensure_future(served.stub.Generate(make_request([i], 50, request_id="same"), metadata=client))
            for i, client in enumerate((ANNE, BOB))
        ]
        await served.until(lambda info: info.running + info.queued == 2)
        errors = []
        for request_id, client in (("same", (("client", "eve"),)), ("unknown", ANNE)):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await served.stub.Abort(pb.AbortRequest(request_id=request_id), metadata=client)
            assert caught.value.code() is grpc.StatusCode.NOT_FOUND
            errors.append(str(caught.value.details()).replace(request_id, "ID"))
        assert errors[0] == errors[1], "the error does not reveal other clients' ids"
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await served.stub.Generate(make_request(request_id="same"), metadata=ANNE)
        assert caught.value.code() is grpc.StatusCode.ALREADY_EXISTS
        await served.stub.Abort(pb.AbortRequest(request_id="same"), metadata=ANNE)
        served.target.open.set()
        mine, others = await asyncio.gather(*calls)
        assert (mine.finish_reason, others.finish_reason) == ("abort", "length")


async def test_cached_prefixes_reveal_no_prompt() -> None:
    """Another client learns nothing about a secret. The same client learns only whole pages."""
    known, secret = [5] * 32, list(range(100, 116))
    async with serving(RecordingTarget(slots=64)) as served:

        async def cached(prompt: list[int], client: Any) -> int:
            response = await served.stub.Generate(make_request(prompt, 2), metadata=client)
            return int(response.usage.cached_tokens)

        assert await cached([*known, *secret, 1], ANNE) == 0
        assert await cached([*known, *secret, 1], BOB) == 0
        for guessed in range(16):
            assert await cached([*known, *secret[:guessed], 200 + guessed], ANNE) == 32
        assert await cached([*known, *secret[:15], 3], ANNE) == 32
        assert await cached([*known, *secret, 4], ANNE) == 48
