"""Streams of rounds: limits, and the slots of coordinators that disconnect."""

import asyncio
import gc
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
from worker_service import NO_SLOT, OK, PATIENCE_SECONDS, SLOTS, Worker, failure, held, until, verify

from specpool.protocol.errors import QueueFullError
from specpool.worker.streams import MAX_STREAMS, MAX_STREAMS_PER_CLIENT, RoundStreams


def impatient(worker: Worker) -> Worker:
    """Let coordinators without streams count as gone at once."""
    worker.host.streams.orphaned_seconds = 0.01
    return worker


@pytest.fixture(name="target")
def impatient_target(target: Worker) -> Worker:
    return impatient(target)


@pytest.fixture(name="worker")
def impatient_worker(worker: Worker) -> Worker:
    return impatient(worker)


# A coordinator that takes every slot of a target worker, then waits until it is killed.
COORDINATOR = f"""
import sys, time, grpc
from specpool.v1 import target_worker_pb2 as pb, target_worker_pb2_grpc
stub = target_worker_pb2_grpc.TargetWorkerServiceStub(grpc.insecure_channel(sys.argv[1]))
items = [pb.VerifyItem(sequence_id=i, token_ids=[5, i]) for i in range({SLOTS})]
def requests():
    yield pb.VerifyRequest(coordinator_id="killed", round_id=1, items=items)
    time.sleep(600)
for response in stub.VerifyStream(requests()):
    print([result.status for result in response.results], flush=True)
"""


async def until_served(worker: Worker, *items: Any, coordinator_id: str) -> None:
    """Repeat a round until it gets slots: a worker notices closed connections late."""
    async with asyncio.timeout(PATIENCE_SECONDS):
        while {result.status for result in await worker.round(*items, coordinator_id=coordinator_id)} != {OK}:  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def fill(worker: Worker, stream: Any, coordinator_id: str) -> None:
    """Take every slot over a stream."""
    items = [worker.item(i, 0, [5, i]) for i in range(SLOTS)]
    await stream.write(worker.request(*items, coordinator_id=coordinator_id))
    assert {result.status for result in (await stream.read()).results} == {OK}


async def test_a_killed_coordinator_frees_its_slots_at_once(target: Worker) -> None:
    address = target.address
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", COORDINATOR, address, stdout=subprocess.PIPE)
    assert process.stdout is not None
    try:
        assert await process.stdout.readline() == f"{[OK] * SLOTS}\n".encode()
        (result,) = await target.round(verify(1, 0, [7]), coordinator_id="next")
        assert result.status == NO_SLOT
    finally:
        process.send_signal(signal.SIGKILL)
        await process.wait()
    await until_served(target, *(verify(i, 0, [7, i]) for i in range(SLOTS)), coordinator_id="next")


async def test_a_reconnected_coordinator_keeps_its_free_slots(worker: Worker) -> None:
    stream = worker.open_stream()
    await fill(worker, stream, "away")
    stream.cancel()
    await until_served(worker, worker.item(1, 0, [7]), coordinator_id="next")
    results = await worker.round(*(worker.item(i, 2, [6]) for i in range(SLOTS)), coordinator_id="away")
    assert sorted(result.status == OK for result in results) == [False] + [True] * (SLOTS - 1)
    # Its lease is renewed, so nobody takes the others.
    (result,) = await worker.round(worker.item(2, 0, [7]), coordinator_id="next")
    assert result.status == NO_SLOT


async def test_a_coordinator_with_another_stream_open_keeps_its_slots(worker: Worker) -> None:
    streams = [worker.open_stream() for _ in range(2)]
    for stream in streams:
        await fill(worker, stream, "busy")
    streams[0].cancel()
    await until(lambda: worker.host.streams._open.total() == 1)
    (result,) = await worker.round(worker.item(1, 0, [7]), coordinator_id="next")
    assert result.status == NO_SLOT


async def test_a_coordinator_of_single_calls_keeps_its_slots(worker: Worker) -> None:
    await worker.round(*(worker.item(i, 0, [5]) for i in range(SLOTS)), coordinator_id="single")
    stream = worker.open_stream()
    await stream.write(worker.request(coordinator_id="other"))
    await stream.read()
    stream.cancel()
    await until(lambda: worker.host.streams._open.total() == 0)
    (result,) = await worker.round(worker.item(1, 0, [7]), coordinator_id="next")
    assert result.status == NO_SLOT


async def test_a_round_in_flight_when_its_stream_ends_orphans_its_coordinator(target: Worker) -> None:
    with held(target) as hold:
        stream = target.open_stream()
        await stream.write(target.request(*(verify(i, 0, [5]) for i in range(SLOTS)), coordinator_id="killed"))
        assert await asyncio.to_thread(hold.began.wait, PATIENCE_SECONDS)
        stream.cancel()
        await until(lambda: target.host.streams._open.total() == 0)
        hold.open.set()
        await until_served(target, *(verify(i, 0, [7]) for i in range(SLOTS)), coordinator_id="next")


async def test_excess_streams_are_refused_until_one_ends(worker: Worker) -> None:
    worker.host.streams.max_per_client = MAX_STREAMS
    streams = [worker.open_stream() for _ in range(MAX_STREAMS)]
    for number, stream in enumerate(streams):
        await stream.write(worker.request(coordinator_id=f"c{number}"))
        await stream.read()
    error = await failure(worker.open_stream().read())
    assert error.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
    assert await worker.round() == [], "single calls go on"
    streams[0].cancel()
    await until(lambda: worker.host.streams._open.total() < MAX_STREAMS)
    stream = worker.open_stream()
    await stream.write(worker.request())
    assert await stream.read() is not grpc.aio.EOF


@pytest.mark.slow
async def test_flow_control_holds_back_a_fast_client(target: Worker) -> None:
    """HTTP/2 keeps 64 MB of requests at the client, not in the worker."""
    request = target.request(verify(1, 0, [2**32 - 1] * 200_000))
    with held(target) as hold:
        stream = target.open_stream()
        await stream.write(target.request(verify(1, 0, [5])))
        assert await asyncio.to_thread(hold.began.wait, PATIENCE_SECONDS)
        sent, blocked = 0, False
        while not blocked and sent < 64:
            try:
                await asyncio.wait_for(stream.write(request), 2)
                sent += 1
            except TimeoutError:
                blocked = True
        assert blocked
        stream.cancel()
        await until(lambda: target.host.streams._open.total() == 0)
        hold.open.set()
    await until(lambda: not target.host.streams._reading)
    gc.collect()
    assert not [task for task in asyncio.all_tasks() if "anext" in repr(task)]
    (result,) = await target.round(verify(1, 0, [5]), coordinator_id="next")
    assert result.status == OK


async def never() -> AsyncIterator[Any]:
    """Requests that never arrive."""
    await asyncio.sleep(3600)
    yield None


async def echo(request: Any) -> Any:
    return request


async def test_one_client_leaves_streams_to_others() -> None:
    streams = RoundStreams(lambda _: None)
    calls = [streams.each(never(), echo, "greedy") for _ in range(MAX_STREAMS_PER_CLIENT)]
    open_ones = [asyncio.create_task(anext(call, None)) for call in calls]  # type: ignore[arg-type, var-annotated]
    await asyncio.sleep(0)
    with pytest.raises(QueueFullError, match="of this client"):
        await anext(streams.each(never(), echo, "greedy"))
    other = asyncio.create_task(anext(streams.each(never(), echo, "other"), None))  # type: ignore[arg-type, var-annotated]
    await asyncio.sleep(0.01)
    assert not other.done()
    streams.drain()
    await asyncio.gather(*open_ones, other)
