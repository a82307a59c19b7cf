"""A hung model thread: health checks fail, new work is refused, and calls without the model are answered."""

import asyncio
import logging
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from tiny_models import forget_all
from worker_service import (
    OK,
    PATIENCE_SECONDS,
    SLOTS,
    TARGET,
    Worker,
    failure,
    held,
    until,
    verify,
    wait_serving,
    worker_process,
)

from specpool.engine.run.engine import Engine
from specpool.protocol.errors import UnavailableError
from specpool.rpc.server.server import LIVE
from specpool.v1 import target_worker_pb2
from specpool.worker.host import WorkerHost
from specpool.worker.model_thread import CHECKS, MAX_WAITING, ModelThread, Watchdog
from target_worker.verifier import Verifier

# A worker whose rounds never end.
HANGING = """
import time, specpool.worker.process
from types import SimpleNamespace
from specpool.rpc.observability.logs import configure_logging
from specpool.v1 import target_worker_pb2_grpc as pb_grpc
from specpool.worker.servicer import WorkerServicer
from specpool.worker.settings import WorkerSettings

class Servicer(WorkerServicer, pb_grpc.TargetWorkerServiceServicer):
    async def Verify(self, request, context):
        await self._host.run(lambda backend: time.sleep(3600))

configure_logging("info")
specpool.worker.process.CLOSE_SECONDS = 0.2
backend = SimpleNamespace(passes=0, info=lambda: "info", expire=lambda *_: 0)
specpool.worker.process.run_worker(
    "worker", WorkerSettings.load("worker"), lambda report: backend, "specpool.v1.TargetWorkerService",
    pb_grpc.add_TargetWorkerServiceServicer_to_server, Servicer, (),
)
"""

# A worker that cannot load its model, and prints at exit how many objects are exempt from garbage collection.

NAMES = ["", LIVE, "specpool.v1.TargetWorkerService"]
SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING


async def statuses(channel: grpc.aio.Channel) -> set[int]:
    health = health_pb2_grpc.HealthStub(channel)
    return {(await health.Check(health_pb2.HealthCheckRequest(service=name))).status for name in NAMES}


async def until_status(channel: grpc.aio.Channel, status: int) -> None:
    async with asyncio.timeout(PATIENCE_SECONDS):
        while await statuses(channel) != {status}:  # noqa: ASYNC110 - several names are watched
            await asyncio.sleep(0.01)


async def test_a_hung_pass_fails_every_health_check_until_it_ends(
    engines: dict[str, Engine], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    engine = engines[TARGET.name]
    forget_all(engine, SLOTS)
    load = lambda report: Verifier(engine)  # noqa: E731
    async with (
        worker_process(TARGET, load, monkeypatch, watchdog_seconds=0.2) as started,
        grpc.aio.insecure_channel(started.address) as channel,
    ):
        await wait_serving(channel)
        worker = Worker(TARGET, WorkerHost(lambda report: None), channel, engine)
        assert await statuses(channel) == {SERVING}
        with held(worker) as hold:
            hung = asyncio.create_task(worker.round(verify(1, 0, [5]), round_id=77))
            await until_status(channel, NOT_SERVING)
            error = await failure(worker.round(verify(2, 0, [5])))
            assert error.code() == grpc.StatusCode.UNAVAILABLE
            assert "hangs: Verify (round 77, 1 sequences)" in error.details()
            assert (await worker.info()).model.architecture == "llama"
            (record,) = [record for record in caplog.records if record.levelno == logging.ERROR]
            assert "Verify (round 77, 1 sequences)" in record.getMessage()
            assert re.search(r"\d+ s; it is in wait \(threading\.py:\d+\)", record.getMessage())
            assert "verify (verifier.py:" in record.getMessage()
            hold.open.set()
            assert [result.status for result in await hung] == [OK]
        await until_status(channel, SERVING)
        assert [result.status for result in await worker.round(verify(2, 0, [5]))] == [OK]


@pytest.mark.parametrize("is_told", [True, False])
async def test_a_hung_process_still_ends(is_told: bool) -> None:
    """At once on SIGTERM; otherwise after twice the time limit."""
    command = [sys.executable, "-c", HANGING, "--port", "0", "--watchdog-seconds", "0.3", "--drain-seconds", "0.1"]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("SPECPOOL_")}
    process = await asyncio.create_subprocess_exec(*command, env=environment, stderr=subprocess.PIPE)
    assert process.stderr is not None
    try:
        port = None
        while port is None:
            line = (await process.stderr.readline()).decode()
            assert line, "it ended"
            port = re.search(r"listening on 127\.0\.0\.1:(\d+)$", line)
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port[1]}") as channel:
            await wait_serving(channel)
            call = TARGET.stub(channel).Verify(
                target_worker_pb2.VerifyRequest(coordinator_id="c", round_id=1, items=[verify(1, 0, [5])])
            )
            await until_status(channel, NOT_SERVING)
            if is_told:
                process.send_signal(signal.SIGTERM)
            async with asyncio.timeout(PATIENCE_SECONDS):
                log = (await process.communicate())[1].decode()
            await failure(call)
    finally:
        if process.returncode is None:
            process.kill()
    assert process.returncode == 1
    assert "stopped while the model was still running" in log or "the process ends" in log
    assert "Traceback" not in log


@pytest.mark.parametrize("method", ["GetWorkerInfo", "GetTokenizer"])
async def test_calls_without_the_model_are_answered_during_a_long_pass(target: Worker, method: str) -> None:
    with held(target) as hold:
        call = asyncio.create_task(target.round(verify(1, 0, [5])))
        assert await asyncio.to_thread(hold.began.wait, PATIENCE_SECONDS)
        async with asyncio.timeout(PATIENCE_SECONDS / 2):
            if method == "GetWorkerInfo":
                assert (await target.info()).load.slots_in_use == 0, "as it was before the pass"
            else:
                await target.stub.GetTokenizer(target_worker_pb2.GetTokenizerRequest())
        hold.open.set()
        await call
    assert (await target.info()).load.slots_in_use == 1


# --- The watchdog alone


class Watched:
    """A watchdog with a fake clock over a controlled thread."""

    def __init__(self, seconds: float = 10.0) -> None:
        self.thread = ModelThread()
        self.passes, self.now, self.seconds = 0, time.monotonic(), seconds
        self.changes: list[bool] = []
        self.dog = Watchdog(self.thread, lambda: self.passes, seconds, self.changes.append)

    def wait(self, seconds: float) -> None:
        """Check at the rate of `watch`."""
        for _ in range(round(seconds / self.seconds * CHECKS)):
            self.now += self.seconds / CHECKS
            self.dog.check(self.now)

    async def begin(self, function: Callable[[], Any]) -> asyncio.Task[Any]:
        begun = threading.Event()

        def work() -> Any:
            begun.set()
            return function()

        task = asyncio.create_task(self.thread.run("work", work))
        assert await asyncio.to_thread(begun.wait, PATIENCE_SECONDS)
        return task


async def test_long_work_with_progress_does_not_hang() -> None:
    watched, stop = Watched(), threading.Event()
    task = await watched.begin(stop.wait)
    for _ in range(5):
        watched.wait(9.0)
        watched.passes += 1
    assert watched.changes == []
    watched.wait(12.0)
    assert watched.changes == [True]
    watched.passes += 1
    watched.wait(1.0)
    assert watched.changes == [True, False]
    stop.set()
    await task
    assert watched.thread.close()


async def test_consecutive_work_items_do_not_hang() -> None:
    watched = Watched()
    for _ in range(5):
        stop = threading.Event()
        task = await watched.begin(stop.wait)
        watched.wait(9.0)
        stop.set()
        await task
    assert watched.changes == []
    assert watched.thread.close()


async def test_time_while_the_process_was_stopped_does_not_count() -> None:
    watched, stop = Watched(), threading.Event()
    task = await watched.begin(stop.wait)
    watched.wait(2.0)
    watched.now += 1000.0
    watched.wait(2.0)
    assert watched.changes == []
    stop.set()
    await task
    assert watched.thread.close()


# --- The thread alone


async def test_excess_calls_fail_with_unavailable() -> None:
    thread, stop = ModelThread(), threading.Event()
    first = asyncio.create_task(thread.run("first", stop.wait))
    await until(lambda: thread.running is not None)
    waiting = [asyncio.create_task(thread.run("waits", lambda: 7)) for _ in range(MAX_WAITING)]
    await asyncio.sleep(0)
    with pytest.raises(UnavailableError, match=f"{MAX_WAITING} calls wait"):
        await thread.run("one more", lambda: 8)
    waiting.pop().cancel()
    await asyncio.sleep(0)
    waiting.append(asyncio.create_task(thread.run("in its place", lambda: 7)))
    await asyncio.sleep(0)
    stop.set()
    assert await first
    assert await asyncio.gather(*waiting) == [7] * MAX_WAITING
    assert thread.close()


async def test_a_cancelled_call_leaves_nothing_behind() -> None:
    thread, stop, ran = ModelThread(), threading.Event(), list[int]()
    first = asyncio.create_task(thread.run("first", stop.wait))
    await until(lambda: thread.running is not None)
    for number in range(3 * MAX_WAITING):
        call = asyncio.create_task(thread.run("cancelled", lambda number=number: ran.append(number)))  # type: ignore[misc]
        await asyncio.sleep(0)
        call.cancel()
        await asyncio.wait([call])
    assert not thread._waiting
    first.cancel()
    stop.set()
    assert await thread.run("last", lambda: ran) == []
    assert thread.close()


@pytest.mark.parametrize("error", [ValueError("v"), StopIteration("s"), SystemExit(3)])
async def test_exceptions_reach_the_caller(error: BaseException) -> None:
    thread = ModelThread()

    def fail() -> None:
        raise error

    with pytest.raises((type(error), RuntimeError)):
        await thread.run("fails", fail)
    assert await thread.run("goes on", lambda: 1) == 1
    assert thread.close()


async def test_close_honors_its_timeout() -> None:
    thread, stop = ModelThread(), threading.Event()
    call = asyncio.create_task(thread.run("hangs", stop.wait))
    await until(lambda: thread.running is not None)
    assert not thread.close(timeout=0.01)
    stop.set()
    assert await call
    assert thread.close()


RUNNING_AT_EXIT = """
import asyncio, atexit, threading
from specpool.worker.model_thread import ModelThread

begun, leaving = threading.Event(), threading.Event()

def run():
    begun.set()
    leaving.wait()
    print(sum(range(10**6)), flush=True)

async def main():
    running = asyncio.create_task(ModelThread().run("a pass", run))
    await asyncio.to_thread(begun.wait)
    atexit.register(leaving.set)

asyncio.run(main())
"""


def test_a_running_function_finishes_before_the_interpreter_exits() -> None:
    """Otherwise, its thread would end in compiled code, which aborts the process."""
    command = [sys.executable, "-c", RUNNING_AT_EXIT]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=PATIENCE_SECONDS)
    assert done.stdout == f"{sum(range(10**6))}\n"
