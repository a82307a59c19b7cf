"""Requests that kill or hang the target fail alone; all other requests get their tokens."""

import asyncio
from itertools import islice
from typing import Any

import grpc
import pytest
from replicas import replicas, with_standby
from serving import RecordingTarget, check_tokens, make_request, serving, stream

from specpool.testing import FakeTarget
from specpool.v1 import common_pb2
from specpool.v1 import generation_pb2 as pb

POISON = 250


class Mortal(RecordingTarget):
    """A target that dies and restarts whenever a round has a token in `deadly`."""

    def __init__(self, deadly: list[int], **knobs: Any) -> None:
        super().__init__(**knobs)
        self.deadly, self.deaths = deadly, 0
        self._restarts: list[asyncio.Task[None]] = []

    async def start(self, address: str = "127.0.0.1:0") -> str:
        self.address = await super().start(address)
        return self.address

    async def _restart(self) -> None:
        await self.stop()
        await self.start(self.address)

    async def Verify(self, request: Any, context: Any) -> Any:
        if any(token in self.deadly for item in request.items for token in self.tokens_of(request, item)):
            self.deaths += 1
            self._restarts.append(asyncio.create_task(self._restart()))
            await asyncio.sleep(3600)
        return await super().Verify(request, context)


def innocents(target: FakeTarget, deadly: int, number: int) -> list[pb.GenerateRequest]:
    """Requests that neither contain nor generate the deadly token."""
    prompts = ([1, i] for i in range(POISON))
    return [
        make_request(prompt, 30, k=0)
        for prompt in islice((p for p in prompts if deadly not in [*p, *target.continuation(p, 30)]), number)
    ]


async def test_request_that_kills_the_target_fails_alone() -> None:
    target = Mortal([POISON])
    requests = innocents(target, POISON, 6)
    async with serving(target, with_draft=False) as served:
        neighbours = [asyncio.ensure_future(served.expect(request)) for request in requests]
        with pytest.raises(grpc.aio.AioRpcError, match="failed 4 times") as caught:
            await served.stub.Generate(make_request([POISON], 5))
        assert caught.value.code() is grpc.StatusCode.INTERNAL
        await asyncio.gather(*neighbours)
        assert target.deaths == 4
        await served.until_idle()


async def test_request_that_kills_one_of_several_targets_fails_alone() -> None:
    targets = [Mortal([POISON]), Mortal([POISON])]
    requests = innocents(targets[0], POISON, 6)
    async with replicas(targets[1], first=targets[0], with_draft=False) as served:
        neighbours = [asyncio.ensure_future(served.expect(request)) for request in requests]
        with pytest.raises(grpc.aio.AioRpcError, match="failed 4 times"):
            await served.stub.Generate(make_request([POISON], 5))
        await asyncio.gather(*neighbours)
        # A round that is sent to a dying target counts, too.
        assert 3 <= sum(target.deaths for target in targets) <= 4
        await served.until(lambda info: info.running == info.queued == 0)


async def test_request_that_kills_the_target_and_its_standby_fails_alone() -> None:
    target, standby = Mortal([POISON]), Mortal([POISON])
    requests = innocents(target, POISON, 6)
    async with with_standby(standby, first=target, with_draft=False) as (served, _):
        neighbours = [asyncio.ensure_future(served.expect(request)) for request in requests]
        with pytest.raises(grpc.aio.AioRpcError, match="failed 4 times"):
            await served.stub.Generate(make_request([POISON], 5))
        await asyncio.gather(*neighbours)
        # A round that is sent to a dying target counts, too.
        assert 3 <= target.deaths + standby.deaths <= 4


async def test_sequence_that_becomes_deadly_fails_alone() -> None:
    target = Mortal([])
    prompt = [9, 9]
    tokens = target.continuation(prompt, 40)
    deadly = next(token for token in tokens[20:] if tokens.count(token) == 1)
    requests = innocents(target, deadly, 4)
    target.deadly.append(deadly)
    async with serving(target, with_draft=False) as served:
        neighbours = [asyncio.ensure_future(served.expect(request)) for request in requests]
        call, seen = served.stub.GenerateStream(make_request(prompt, 40, k=0)), []
        while len(seen) < tokens.index(deadly) + 1:
            seen.extend((await call.read()).chunk.token_ids)
        assert seen == tokens[: len(seen)]
        with pytest.raises(grpc.aio.AioRpcError, match="failed 4 times"):
            await call.read()
        await asyncio.gather(*neighbours)
        assert target.deaths == 4


async def test_occasional_deaths_of_the_target_fail_no_request() -> None:
    class Stepped(RecordingTarget):
        """A target that answers one round per permit."""

        permits = asyncio.Semaphore(0)

        async def Verify(self, request: Any, context: Any) -> Any:
            await self.permits.acquire()
            return await super().Verify(request, context)

    def permit(target: Stepped, rounds: int) -> None:
        for _ in range(rounds):
            target.permits.release()

    async with serving(Stepped(), with_draft=False) as served:
        requests = [make_request([i], 150, k=0) for i in range(4)]
        streams = [asyncio.ensure_future(stream(served, request)) for request in requests]
        for _ in range(8):
            permit(served.target, 4)
            await served.until(lambda _: served.target.permits.locked())
            await served.target.stop()
            await served.target.start(served.target_address)
        permit(served.target, 1000)
        for request, (_, complete) in zip(requests, await asyncio.gather(*streams), strict=True):
            check_tokens(served.target, request, complete)


async def test_request_that_hangs_the_target_fails_alone() -> None:
    class Hanging(RecordingTarget):
        async def Verify(self, request: Any, context: Any) -> Any:
            if any(POISON in item.token_ids for item in request.items):
                await asyncio.sleep(3600)
            return await super().Verify(request, context)

    async with serving(Hanging(), with_draft=False, target_timeout_seconds=0.3) as served:
        requests = innocents(served.target, POISON, 3)
        neighbours = [asyncio.ensure_future(served.expect(request)) for request in requests]
        with pytest.raises(grpc.aio.AioRpcError, match="DEADLINE_EXCEEDED"):
            await served.stub.Generate(make_request([POISON], 5))
        await asyncio.gather(*neighbours)


async def test_cache_lost_in_every_round_fails_the_request() -> None:
    class Forgetful(RecordingTarget):
        async def Verify(self, request: Any, context: Any) -> Any:
            response = await super().Verify(request, context)
            for result in response.results:
                result.Clear()
                result.status = common_pb2.ITEM_STATUS_CACHE_MISS
            for result, item in zip(response.results, request.items, strict=True):
                result.sequence_id = item.sequence_id
            return response

    async with serving(Forgetful(), with_draft=False) as served:
        with pytest.raises(grpc.aio.AioRpcError, match="lost the cache"):
            await served.stub.Generate(make_request([1], 5))
