"""`SubscribeKvEvents` over a real socket: cached pages in the messages of the gateway."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any
from unittest import mock

import grpc
import pytest
from serving import PATIENCE_SECONDS, Serving, make_request, serving
from smg_grpc_proto import vllm_engine_pb2_grpc
from smg_grpc_proto.generated import common_pb2

from coordinator.scheduling.cache_events import CacheEvents
from specpool.testing import FakeTarget
from specpool.testing.fake_caches import PAGE_SIZE

OURS, OTHERS = ("ipv4:127.0.0.1", ""), ("ipv4:127.0.0.2", "")
FIRST, SECOND, THIRD = (bytes([255 - number]) * 16 for number in range(3))


@pytest.fixture
async def served() -> AsyncIterator[Serving]:
    async with serving(with_draft=False, smg=True) as started:
        yield started


def events_of(served: Serving) -> CacheEvents:
    events = served.process.coordinator.cache_events
    assert events is not None
    return events


def subscribe(served: Serving, start: int = 0) -> Any:
    request = common_pb2.SubscribeKvEventsRequest(start_sequence_number=start)
    return vllm_engine_pb2_grpc.VllmEngineStub(served.channel).SubscribeKvEvents(request, timeout=PATIENCE_SECONDS)


def hash_of(digest: bytes) -> int:
    return int.from_bytes(digest[:8], signed=True)


def stored(event: common_pb2.KvCacheEvent) -> tuple[int | None, int, list[int], int]:
    """Parent, hash, token ids and size of the only block of an event."""
    (block,) = event.stored.blocks
    parent = event.stored.parent_block_hash if event.stored.HasField("parent_block_hash") else None
    return parent, block.block_hash, list(block.token_ids), block.block_size


async def test_stream_begins_with_all_pages_and_continues_with_changes(served: Serving) -> None:
    events = events_of(served)
    events.stored(OURS, None, FIRST, [1, 2])
    events.stored(OTHERS, None, THIRD, [9, 9])
    call = subscribe(served, start=1234)
    snapshot = await call.read()
    assert (snapshot.sequence_number, snapshot.timestamp > 0) == (1, True)
    assert (snapshot.snapshot.index, snapshot.snapshot.count, snapshot.snapshot.blocks) == (0, 1, 1)
    cleared, page = snapshot.events
    assert cleared.HasField("cleared")
    assert stored(page) == (None, hash_of(FIRST), [1, 2], 2)

    events.removed(THIRD)
    events.stored(OURS, FIRST, SECOND, [3, 4])
    batch = await call.read()
    assert (batch.sequence_number, batch.HasField("snapshot")) == (2, False)
    assert [stored(event) for event in batch.events] == [(hash_of(FIRST), hash_of(SECOND), [3, 4], 2)]
    events.removed(SECOND)
    batch = await call.read()
    assert batch.sequence_number == 3
    assert [list(event.removed.block_hashes) for event in batch.events] == [[hash_of(SECOND)]]


async def test_cached_and_evicted_pages_of_answers_are_published() -> None:
    async with serving(FakeTarget(kv_positions=5 * PAGE_SIZE), with_draft=False, smg=True) as served:
        call, known = subscribe(served), dict[int, list[int]]()

        async def until(number: int) -> list[int]:
            """Read until this number of pages is cached. Return their tokens."""
            while len(known) != number:
                for event in (await call.read()).events:
                    if event.HasField("stored"):
                        _, digest, token_ids, _ = stored(event)
                        known[digest] = token_ids
                    for digest in event.removed.block_hashes:
                        del known[digest]
            return [token for token_ids in known.values() for token in token_ids]

        request = make_request(range(100, 140))
        answer = await served.expect(request)
        tokens = [*request.tokenized.input_ids, *answer.token_ids]
        assert await until(3) == tokens[: 3 * PAGE_SIZE]
        salted = make_request(range(40))
        salted.cache_salt = "secret"
        await served.expect(salted)  # evicts the last page, and its own pages are not published
        assert await until(2) == tokens[: 2 * PAGE_SIZE]


async def test_slow_reader_gets_all_pages_again(served: Serving) -> None:
    call = subscribe(served)
    await call.read()
    with mock.patch("coordinator.scheduling.cache_events.MAX_UNREAD", 2):
        for number in range(3):
            events_of(served).stored(OURS, None, bytes([number]) * 16, [number] * 2)
    batch = await call.read()
    assert (batch.sequence_number, batch.snapshot.count, batch.snapshot.blocks) == (2, 1, 3)
    assert batch.events[0].HasField("cleared")
    assert [stored(event)[2] for event in batch.events[1:]] == [[number] * 2 for number in range(3)]
    events_of(served).removed(bytes(16))
    batch = await call.read()
    assert (batch.sequence_number, batch.HasField("snapshot")) == (3, False)


async def test_large_snapshot_has_several_chunks(served: Serving) -> None:
    for number in range(4):
        events_of(served).stored(OURS, None, bytes([number]) * 16, [number] * 2)
    with mock.patch("coordinator.smg.cache_batches.MAX_BATCH_EVENTS", 2):
        call = subscribe(served)
        chunks = [await call.read() for _ in range(3)]
    assert [chunk.sequence_number for chunk in chunks] == [1, 2, 3]
    assert [(chunk.snapshot.index, chunk.snapshot.count, chunk.snapshot.blocks) for chunk in chunks] == [
        (index, 3, 4) for index in range(3)
    ]
    events_of(served).removed(bytes(16))
    assert (await call.read()).sequence_number == 4


async def test_nothing_is_published_without_prefix_caching() -> None:
    async with serving(with_draft=False, smg=True, prefix_caching=False) as served:
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await subscribe(served).read()
    assert refused.value.code() == grpc.StatusCode.UNIMPLEMENTED
    assert refused.value.details() == "SubscribeKvEvents: prefix caching is disabled"


async def test_drain_ends_streams() -> None:
    async with serving(with_draft=False, smg=True, drain_seconds=PATIENCE_SECONDS) as served:
        call = subscribe(served)
        await call.read()
        served.process.server.stop()
        async with asyncio.timeout(PATIENCE_SECONDS / 2):
            assert await call.read() is grpc.aio.EOF
            assert await call.code() == grpc.StatusCode.OK
