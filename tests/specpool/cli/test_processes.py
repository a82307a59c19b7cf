"""A child process that stops answering is restarted."""

import asyncio
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from specpool.cli.probes import Checks
from specpool.cli.processes import MAX_UNANSWERED, ProcessFailedError, Service, kill
from specpool.rpc.ports import free_port

SUPPORT = Path(__file__).parents[2] / "support"
PATIENCE_SECONDS = 60


class Noting(Service):
    """Counts the checks that have ended; a stopped process answers none."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.checks = asyncio.Semaphore(0)

    async def answers(self, checks: Checks) -> bool:
        answered = await super().answers(checks)
        self.checks.release()
        return answered


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(signal, "SIGSTOP"), reason="no SIGSTOP")
@pytest.mark.parametrize("stops_when", ["served", "watched"])
async def test_stopped_process_is_restarted(
    stops_when: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Even if it stops before it is first checked."""
    monkeypatch.setenv("PYTHONPATH", str(SUPPORT))
    port = free_port()
    service = Noting("health", "health_process", [str(port)], f"127.0.0.1:{port}")
    service.restart_seconds, service.liveness_timeout_seconds = 0.0, 1.0
    await service.start()
    first = service.process
    assert first is not None
    if stops_when == "served":
        await service.wait_serving()
        os.kill(first.pid, signal.SIGSTOP)
    keeping = asyncio.create_task(service.keep_running())
    try:
        async with asyncio.timeout(PATIENCE_SECONDS):
            if stops_when == "watched":
                await service.checks.acquire()
                os.kill(first.pid, signal.SIGSTOP)
            assert await first.wait() == -signal.SIGKILL
            while service.process is first:  # noqa: ASYNC110 - another task replaces it
                await asyncio.sleep(0.01)
            await service.wait_serving()
        assert "has not answered 2 health checks; killing it" in caplog.text
    finally:
        keeping.cancel()
        await asyncio.gather(keeping, return_exceptions=True)
        await kill([service.process] if service.process is not None else [])


async def test_a_process_that_refuses_connections_keeps_running() -> None:
    """As one whose clients hold `max_connections`."""
    async with await asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.1", 0) as refusing:
        service = Noting("refusing", "", [], f"127.0.0.1:{refusing.sockets[0].getsockname()[1]}")
        service.liveness_seconds, service.liveness_timeout_seconds = 0.0, 0.5
        sleep = [sys.executable, "-c", "import time; time.sleep(3600)"]
        service.process = await asyncio.create_subprocess_exec(*sleep, start_new_session=True)
        service.has_served = True
        keeping = asyncio.create_task(service._kill_if_stopped(service.process))
        for _ in range(MAX_UNANSWERED + 1):
            waiting = asyncio.create_task(service.checks.acquire())
            await asyncio.wait([waiting, keeping], return_when=asyncio.FIRST_COMPLETED)
        assert service.process.returncode is None
        assert not keeping.done()
        keeping.cancel()
        await kill([service.process])


async def test_errors_have_the_flags_of_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "refusing.py").write_text("raise SystemExit('--kv-memory of 1MiB is too small: raise --kv-memory')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    service = Service("worker", "refusing", [], "127.0.0.1:1", flags={"--kv-memory": "--target-kv-memory"})
    await service.start()
    reason = "worker: --target-kv-memory of 1MiB is too small: raise --target-kv-memory"
    with pytest.raises(ProcessFailedError, match=f"^{reason}$"):
        await service.wait_serving()
