"""Unread streams pause without affecting others, and eventually fail."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest
from prometheus_client import generate_latest
from scraping import Scrape
from serving import PATIENCE_SECONDS, Serving, check_tokens, expected_tokens, make_request, serving, stream

from coordinator.requests.generation import MAX_UNREAD
from specpool.rpc.ports import free_port
from specpool.v1 import generation_pb2 as pb
from specpool.v1 import generation_pb2_grpc

# Channel options of a client that buffers little more than it reads.
SMALL_WINDOW = [("grpc.http2.lookahead_bytes", 1024), ("grpc.http2.bdp_probe", 0)]
LONG = 1200


@asynccontextmanager
async def unread(served: Serving, request: pb.GenerateRequest) -> AsyncIterator[AsyncIterator[Any]]:
    """A stream whose client has read one message."""
    async with grpc.aio.insecure_channel(served.address, options=SMALL_WINDOW) as channel:
        call = generation_pb2_grpc.GenerationServiceStub(channel).GenerateStream(request, timeout=60)
        messages = aiter(call)
        await anext(messages)
        yield messages
        call.cancel()


def paused(served: Serving) -> int:
    return sum(sequence.paused for sequence in served.process.coordinator.lanes.first.window.members)


async def until_paused(served: Serving, number: int = 1) -> None:
    async with asyncio.timeout(PATIENCE_SECONDS):
        while paused(served) != number:  # noqa: ASYNC110 - the state of a window has no event
            await asyncio.sleep(0.01)


def generations(served: Serving) -> list[Any]:
    return [generation for generation, _ in served.process.coordinator.in_flight._samples.values()]


async def test_an_unread_stream_pauses_while_others_go_on() -> None:
    async with serving(max_num_seqs=2) as served, unread(served, make_request([1], LONG, k=4)) as messages:
        await until_paused(served)
        (sample,) = generations(served)[0].samples
        before = sample.sequence.num_generated
        for i in range(5):
            await stream(served, make_request([i], 100))
        served.process.coordinator.lanes.first.window.check_integrity()
        assert sample.sequence.num_generated == before < LONG
        # A round is published once the next one has begun.
        assert MAX_UNREAD < sample.unread <= MAX_UNREAD + 2 * 5
        assert (await served.info()).running == 1
        # The reader comes back, and nothing is lost.
        rest = [message async for message in messages]
        check_tokens(served.target, make_request([1], LONG), rest[-1].complete)
        chunks = [token for message in rest[:-1] for token in message.chunk.token_ids]
        assert chunks == expected_tokens(served.target, make_request([1], LONG))[-len(chunks) :]
        await served.until_idle()


async def test_unread_streams_are_preempted_and_resume_when_they_are_read() -> None:
    request = make_request([1], LONG, k=4)
    async with serving(max_num_seqs=1) as served, unread(served, request) as messages:
        await until_paused(served)
        for i in range(3):
            await stream(served, make_request([i], 100))
        served.process.coordinator.lanes.first.window.check_integrity()
        rest = [message async for message in messages]
        check_tokens(served.target, request, rest[-1].complete)
        await served.until_idle()


async def test_a_paused_stream_can_be_aborted_and_cancelled() -> None:
    async with serving(max_num_seqs=2) as served:
        async with unread(served, make_request([1], LONG, request_id="lazy")) as messages:
            await until_paused(served)
            await served.stub.Abort(pb.AbortRequest(request_id="lazy"))
            rest = [message async for message in messages]
            assert rest[-1].complete.finish_reason == "abort"
            await served.until_idle()
        async with unread(served, make_request([1], LONG)):
            await until_paused(served)
        await served.until_idle()


async def test_a_stalled_stream_fails_and_frees_its_slot() -> None:
    settings = {"max_num_seqs": 1, "stream_stall_seconds": 0.3}
    async with serving(**settings) as served, unread(served, make_request([1], LONG)) as messages:
        await until_paused(served)
        await served.expect(make_request([2], 10))  # in its slot
        await served.until(lambda _: not generations(served))
        info = await served.until_idle()
        assert dict(info.counters.finished) == {"abort": 1, "length": 1}
        with pytest.raises(grpc.aio.AioRpcError, match=r"not read for 0\.3 s") as caught:
            async for _ in messages:
                pass
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert ("specpool-answered", "1") in [*caught.value.trailing_metadata()]


async def test_a_finished_stream_that_stalls_fails_too() -> None:
    settings = {"max_num_seqs": 1, "stream_stall_seconds": 0.3}
    async with serving(**settings) as served, unread(served, make_request([1], MAX_UNREAD, k=0)) as messages:
        await served.until(lambda info: info.counters.finished["length"] == 1)
        async with asyncio.timeout(PATIENCE_SECONDS):
            while generations(served):  # noqa: ASYNC110 - the end of a handler has no event
                await asyncio.sleep(0.01)
        with pytest.raises(grpc.aio.AioRpcError, match="not read"):
            async for _ in messages:
                pass


async def test_a_slow_reader_gets_all_of_a_finished_stream() -> None:
    settings = {"max_num_seqs": 1, "stream_stall_seconds": 0.6}
    request = make_request([1], MAX_UNREAD, k=0)
    async with serving(**settings) as served, unread(served, request) as messages:
        await served.until(lambda info: info.counters.finished["length"] == 1)
        rest = []
        async for message in messages:
            rest.append(message)
            await asyncio.sleep(0.004)  # in total longer than the stall
        check_tokens(served.target, request, rest[-1].complete)


async def test_disconnecting_without_reading_is_not_an_error() -> None:
    async with serving(with_draft=False, metrics_port=free_port()) as served:
        async with unread(served, make_request([1], LONG)):
            await until_paused(served)
        async with asyncio.timeout(PATIENCE_SECONDS):
            while not (codes := codes_of(served, "GenerateStream")):  # noqa: ASYNC110 - the end of a call has no event
                await asyncio.sleep(0.01)
        assert codes == {"Canceled"}
        assert not (await served.info()).counters.refused


def codes_of(served: Serving, method: str) -> set[str]:
    """Status codes of finished calls of a method of the coordinator's service."""
    seen = Scrape.of(generate_latest(served.process.server.registry).decode())
    return {code for *call, code in seen.calls() if call == ["specpool.v1.GenerationService", method]}
