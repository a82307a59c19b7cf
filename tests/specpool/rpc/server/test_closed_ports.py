"""A server whose port gRPC has closed stops, and its process exits with an error, so that a supervisor restarts it."""

import asyncio
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from call_service import calls_server
from framings import END_HEADERS, END_STREAM, HEADERS, PREFACE, SETTINGS, block, frame
from serving import PATIENCE_SECONDS, free_address

from specpool.rpc import ports
from specpool.rpc.ports import free_port, wait_closed
from specpool.rpc.server.calls import Rates

BEGUN = PREFACE + frame(SETTINGS, 0, 0) + frame(SETTINGS, 1, 0)
NOT_UTF8 = frame(HEADERS, END_HEADERS | END_STREAM, 1, block({b":path": b"/\xff"}))

COORDINATOR = """
import sys
from coordinator.server import main
sys.argv += ["--target-address", "127.0.0.1:1"]
main()
"""
# A worker that loads for ever with `--log-name loading`, and otherwise serves.
WORKER = """
import time
from types import SimpleNamespace
from specpool.rpc.observability.logs import configure_logging
from specpool.worker.process import run_worker
from specpool.worker.servicer import WorkerServicer
from specpool.worker.settings import WorkerSettings

def load(report):
    if settings.log_name == "loading":
        time.sleep(3600)
    return SimpleNamespace(passes=0, info=lambda: "info", expire=lambda *_: 0)

configure_logging("info")
settings = WorkerSettings.load("worker")
run_worker("worker", settings, load, "service", lambda *_: None, WorkerServicer, ())
"""


@asynccontextmanager
async def wrong_call(address: str) -> AsyncIterator[None]:
    """Call a path that is not UTF-8, and hold the connection."""
    host, _, port = address.rpartition(":")
    while True:
        try:
            reader, writer = await asyncio.open_connection(host, int(port))
            break
        except ConnectionRefusedError:  # the process has not started
            await asyncio.sleep(0.05)
    writer.write(BEGUN + NOT_UTF8)
    assert await reader.read(1)
    yield
    writer.close()


@pytest.mark.parametrize("is_health", [False, True], ids=["port", "health_port"])
async def test_a_server_stops_when_its_port_closes(is_health: bool, caplog: pytest.LogCaptureFixture) -> None:
    health = free_port()
    async with calls_server(Rates(port_check_seconds=0.1), health_port=health) as (server, calls, address):
        calls.open.set()
        async with wrong_call(f"127.0.0.1:{health}" if is_health else address):
            await server.wait_stopping()
        assert server.has_failed
    lines = [record.message for record in caplog.records if record.name == "specpool.rpc.server.server"]
    assert len(lines) == 1
    assert lines[0].endswith("exiting with status 1 for a restart")


async def test_a_stopped_server_has_not_failed() -> None:
    async with calls_server(Rates(port_check_seconds=0.1)) as (server, _, address):
        server.stop()
        await server.wait_stopped()
        host, _, port = address.rpartition(":")
        await wait_closed(host, int(port), 0.1)
        assert not server.has_failed


@pytest.mark.parametrize(
    ("script", "flags"),
    [
        pytest.param(COORDINATOR, [], id="coordinator"),
        pytest.param(WORKER, [], id="worker", marks=pytest.mark.slow),
        pytest.param(WORKER, ["--log-name", "loading"], id="loading_worker", marks=pytest.mark.slow),
    ],
)
async def test_a_process_whose_port_closes_exits_with_an_error(script: str, flags: list[str]) -> None:
    address = free_address()
    port = address.rpartition(":")[2]
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", script, "--port", port, *flags)
    try:
        async with asyncio.timeout(PATIENCE_SECONDS), wrong_call(address):
            assert await process.wait() == 1
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def test_only_refusals_in_a_row_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """A listener with a full backlog answers nothing, like one on a busy machine."""
    port, checks = free_port(), 0
    with socket.socket() as waiting, socket.socket() as listener:

        async def pause(seconds: float) -> None:
            nonlocal checks
            checks += 1
            if checks == ports.MAX_REFUSALS:
                listener.bind(("127.0.0.1", port))
                listener.listen(0)
                waiting.connect(("127.0.0.1", port))
            elif checks == ports.MAX_REFUSALS + 1:
                listener.close()

        monkeypatch.setattr(asyncio, "sleep", pause)
        await wait_closed("127.0.0.1", port, 0.1)
    assert checks == 2 * ports.MAX_REFUSALS
