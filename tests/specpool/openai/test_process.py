"""The process: flags, signals, and the end of its parent."""

import asyncio
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx2
from openai_service import MODEL
from serving import PATIENCE_SECONDS, free_address, serving

from specpool.rpc.ports import free_port


@asynccontextmanager
async def process(*flags: str) -> AsyncIterator[asyncio.subprocess.Process]:
    command = [sys.executable, "-m", "specpool.openai", *flags]
    running = await asyncio.create_subprocess_exec(*command, stderr=asyncio.subprocess.PIPE)
    try:
        async with asyncio.timeout(PATIENCE_SECONDS):
            yield running
    finally:
        if running.returncode is None:
            running.kill()
        await running.communicate()


async def until_line(running: asyncio.subprocess.Process, part: str) -> None:
    """Read the log up to a line."""
    assert running.stderr is not None
    async for line in running.stderr:
        if part in line.decode():
            return
    raise AssertionError(f"no line has {part!r}")


async def test_sigterm_lets_a_request_finish() -> None:
    port = free_port()
    async with (
        serving(served_model_name=MODEL) as coordinator,
        process("--port", str(port), "--coordinator-address", coordinator.address) as running,
        httpx2.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=PATIENCE_SECONDS) as client,
    ):
        await until_line(running, "is serving")
        coordinator.target.open.clear()
        body = {"model": MODEL, "prompt": "x", "max_tokens": 4}
        answer = asyncio.create_task(client.post("/v1/completions", json=body))
        await coordinator.until(lambda info: info.running)
        running.send_signal(signal.SIGTERM)
        await until_line(running, "draining")
        coordinator.target.open.set()
        assert (await answer).json()["usage"]["completion_tokens"] == 4
        assert await running.wait() == 0


async def test_the_process_ends_with_its_parent() -> None:
    async with process("--port", "0", "--coordinator-address", free_address(), "--parent-pid", "1") as running:
        await until_line(running, "parent process 1 exited")
        assert await running.wait() == 0


async def test_a_port_in_use_is_named() -> None:
    async with process("--port", "0", "--coordinator-address", free_address()) as first:
        assert first.stderr is not None
        async for line in first.stderr:
            if "listening on" in line.decode():
                port = line.decode().split()[-1].rpartition(":")[2]
                break
        async with process("--port", port) as second:
            reason = "Address already in use; give another --port"
            await until_line(second, f"specpool-openai: port: cannot listen on 127.0.0.1:{port}: {reason}")
            assert await second.wait() == 2
