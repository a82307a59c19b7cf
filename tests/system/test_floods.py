"""Floods of calls, whose answers and memory stay bounded; and shutdowns, which always end."""

import asyncio
import signal
import sys
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc
import psutil
import pytest
from serving import PATIENCE_SECONDS, RecordingTarget, expected_tokens, free_address, make_request, serving

from specpool.client import AsyncClient
from specpool.testing import FakeTarget
from specpool.v1 import generation_pb2 as pb

MIB = 2**20
MAX_GROWTH_BYTES = 256 * MIB
"""Bound for 60 of the largest requests: twice `request_memory`, since parsing and tokenizing need copies."""


@asynccontextmanager
async def coordinator(
    target: FakeTarget, *flags: str
) -> AsyncIterator[tuple[asyncio.subprocess.Process, AsyncClient, str]]:
    """A running coordinator process, a client without retries, and the address."""
    address, target_address = free_address(), await target.start()
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "coordinator.server", "--port", address.rpartition(":")[2],
        "--log-level", "error", "--target-address", target_address, *flags,
    )  # fmt: skip
    try:
        async with asyncio.timeout(2 * PATIENCE_SECONDS), AsyncClient(address, retry_seconds=0) as client:
            while not await is_ready(client):  # noqa: ASYNC110 - the state is read over a connection
                await asyncio.sleep(0.05)
            yield process, client, address
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()
        await target.stop()


async def is_ready(client: AsyncClient) -> bool:
    try:
        return (await client.server_info()).target.state == "ready"
    except grpc.RpcError:
        return False


async def test_concurrent_calls_beyond_the_queue_are_each_answered_once() -> None:
    prompts = [[i % 250, i // 250, 9] for i in range(500)]
    settings = {"max_num_seqs": 64, "max_batch_size": 64, "queue_size": 250}
    async with serving(RecordingTarget(slots=64), with_draft=False, **settings) as served:
        async with AsyncClient(served.address, retry_seconds=120) as client:
            answers = await asyncio.gather(*(client.generate(prompt, max_tokens=3) for prompt in prompts))
        for prompt, answer in zip(prompts, answers, strict=True):
            assert list(answer.token_ids) == expected_tokens(served.target, make_request(prompt, 3))
        info = await served.until_idle()
        assert dict(info.counters.finished) == {"length": len(prompts)}


@pytest.mark.slow
async def test_concurrent_large_requests_take_bounded_memory() -> None:
    chat = pb.ChatInput(messages=[pb.ChatMessage()] * (MIB // 2 - 100))
    async with coordinator(FakeTarget()) as (process, client, _):
        before = psutil.Process(process.pid).memory_info().rss
        for request in (make_request([7] * (MIB - 100)), pb.GenerateRequest(chat=chat)):
            codes = Counter(await asyncio.gather(*(client.stub.Generate(request).code() for _ in range(60))))
            assert codes.keys() <= {grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.RESOURCE_EXHAUSTED}
        assert peak_bytes(process.pid) - before < MAX_GROWTH_BYTES
        assert (await client.generate([1, 2, 3], max_tokens=3)).token_ids


def peak_bytes(pid: int) -> int:
    """Peak resident size of a process."""
    with open(f"/proc/{pid}/status") as lines:
        (line,) = [line for line in lines if line.startswith("VmHWM")]
    return int(line.split()[1]) * 1024


async def test_drain_fails_requests_when_the_target_is_gone() -> None:
    target = RecordingTarget()
    async with serving(target, with_draft=False, drain_seconds=600) as served:
        served.process.target_away_seconds = 0.3
        target.open.clear()
        calls = [served.stub.Generate(make_request()) for _ in range(3)]
        codes = asyncio.gather(*(call.code() for call in calls))
        await served.until(lambda info: info.running + info.queued == 3)
        await target.stop()
        await served.until(lambda info: info.target.state != "ready")
        served.process.server.stop()
        async with asyncio.timeout(PATIENCE_SECONDS):
            await served.process.wait_stopped()
        assert set(await codes) == {grpc.StatusCode.UNAVAILABLE}


async def test_drain_waits_for_a_restarting_target() -> None:
    target = RecordingTarget()
    async with serving(target, with_draft=False, drain_seconds=600) as served:
        target.open.clear()
        answer = asyncio.ensure_future(served.expect(make_request()))
        await served.until(lambda info: info.running == 1)
        await target.stop()
        await served.until(lambda info: info.target.state != "ready")
        served.process.server.stop()
        stopping = asyncio.create_task(served.process.wait_stopped())
        target.open.set()
        await target.start(served.target_address)
        await answer
        await stopping


async def test_requests_longer_than_the_drain_end_unavailable() -> None:
    target = RecordingTarget()
    async with serving(target, with_draft=False, drain_seconds=0.3) as served:
        target.open.clear()
        codes = asyncio.gather(served.stub.Generate(make_request()).code(), stream_code(served.stub))
        await served.until(lambda info: info.running + info.queued == 2)
        served.process.server.stop()
        await served.process.server.wait_stopped()
        assert await codes == [grpc.StatusCode.UNAVAILABLE] * 2
        target.open.set()


async def stream_code(stub: object) -> grpc.StatusCode:
    call = stub.GenerateStream(make_request())  # type: ignore[attr-defined]
    try:
        async for _ in call:
            pass
    except grpc.aio.AioRpcError as error:
        return error.code()
    return grpc.StatusCode.OK


BLOCKED_AT_THE_END = """
import asyncio, time
from specpool.rpc.server.server import Server
from specpool.rpc.config.settings import ServerSettings

async def main():
    server = Server(ServerSettings(drain_seconds=0), 2**20)
    server.stop_on_signals()
    await server.start()
    print("started", flush=True)
    await server.wait_stopped()
    print("stopped", flush=True)
    time.sleep(600)

asyncio.run(main())
"""


async def test_second_signal_ends_a_process_with_a_blocked_event_loop() -> None:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", BLOCKED_AT_THE_END, stdout=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None
    async with asyncio.timeout(PATIENCE_SECONDS):
        assert await process.stdout.readline() == b"started\n"
        process.terminate()
        assert await process.stdout.readline() == b"stopped\n"
        process.terminate()
        assert await process.wait() == -signal.SIGTERM
