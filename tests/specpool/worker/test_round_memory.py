"""The memory of rounds counts before they are parsed, over all streams, until they are answered."""

import asyncio
from pathlib import Path
from typing import Any

import grpc
import pytest
from worker_service import DRAFT, OK, PATIENCE_SECONDS, TARGET, Worker, failure, held, serving, verify

from specpool.engine.run.engine import Engine
from specpool.rpc.security.channel import MAX_ROUND_BYTES

MIB = 2**20
EMPTY_ITEMS = b"\x1a\x00" * (29 * MIB // 2)


def peak_bytes() -> int:
    """Peak resident size since the last reset."""
    [line] = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM")]
    return int(line.split()[1]) * 1024


def reset_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def large(worker: Worker, tokens: int) -> Any:
    """A round of one sequence with this many tokens, each of five bytes."""
    return worker.request(verify(1, 0, [2**32 - 1] * tokens))


def padded(worker: Worker, count: int) -> Any:
    """A valid round of this many bytes."""
    request = worker.request(verify(1, 0, [5]))
    request.traceparent = "x" * count
    return request


@pytest.mark.slow
@pytest.mark.parametrize("streamed", [True, False])
async def test_many_empty_items_are_refused_before_they_are_parsed(worker: Worker, streamed: bool) -> None:
    method = "Propose" if worker.role is DRAFT else "Verify"
    path = f"/specpool.v1.{worker.role.name}/{method}"
    reset_peak()
    before = peak_bytes()

    async def attack() -> None:
        if not streamed:
            error = await failure(worker.channel.unary_unary(path)(EMPTY_ITEMS))
        else:
            stream = worker.channel.stream_stream(f"{path}Stream")()
            await stream.write(EMPTY_ITEMS)
            error = await failure(stream.read())
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert "(--request-memory)" in str(error.details())

    await asyncio.gather(*(attack() for _ in range(4)))
    assert peak_bytes() - before < 2 * MAX_ROUND_BYTES * 10, "parsed, each takes a gigabyte"
    assert await worker.round() == []


async def test_rounds_of_all_streams_share_the_memory(engines: dict[str, Engine]) -> None:
    async with serving(TARGET, engines[TARGET.name], request_memory=16 * MIB) as worker:
        with held(worker) as hold:
            first = worker.open_stream()
            await first.write(worker.request(verify(1, 0, [5])))
            assert await asyncio.to_thread(hold.began.wait, PATIENCE_SECONDS)
            waiting = [worker.open_stream() for _ in range(4)]
            for stream in waiting:
                await stream.write(padded(worker, 6 * MIB))
            reads = [asyncio.ensure_future(stream.read()) for stream in waiting]
            done, _ = await asyncio.wait(reads, return_when=asyncio.FIRST_COMPLETED)
            for read in done:
                error = await failure(read)
                assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
                assert "(--request-memory)" in str(error.details())
            hold.open.set()
            assert (await first.read()).results[0].status == OK
        await asyncio.wait(reads)
        assert any(read.exception() is None for read in reads)
        (result,) = await worker.round(verify(2, 0, [5]))
        assert result.status == OK, "all memory is free again"


async def test_a_round_of_maximum_size_is_served_alone(engines: dict[str, Engine]) -> None:
    """Up to the worker's own limits."""
    async with serving(TARGET, engines[TARGET.name]) as worker:
        stream = worker.open_stream()
        request = large(worker, (MAX_ROUND_BYTES - 1000) // 5)
        await stream.write(request)
        error = await failure(stream.read())
        assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert "items[0].token_ids" in str(error.details())
