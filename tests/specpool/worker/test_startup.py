"""A worker reports the phases of its startup while it loads, and why it failed."""

import asyncio
import logging
import threading
from collections.abc import Callable
from typing import Any

import grpc
import pytest
from tiny_models import forget_all
from worker_service import DRAFT, PATIENCE_SECONDS, SLOTS, TARGET, Role, wait_serving, worker_process

from specpool.engine.run.engine import Engine
from specpool.v1 import common_pb2
from specpool.worker.host import WorkerHost

Report = Callable[[str], None]


def watch(role: Role, channel: grpc.aio.Channel) -> Any:
    return role.stub(channel).WatchStartup(common_pb2.WatchStartupRequest())


@pytest.mark.parametrize("role", [TARGET, DRAFT], ids=["target", "draft"])
async def test_phases_are_streamed_and_logged_once(
    role: Role, engines: dict[str, Engine], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    engine = engines[role.name]
    forget_all(engine, SLOTS)
    steps = [threading.Event() for _ in range(3)]

    def load(report: Report) -> Any:
        for phase, step in zip(["importing torch", "loading weights", "testing"], steps, strict=True):
            report(phase)
            assert step.wait(PATIENCE_SECONDS)
        return role.backend(engine)

    async with (
        worker_process(role, load, monkeypatch) as started,
        grpc.aio.insecure_channel(started.address) as channel,
        asyncio.timeout(PATIENCE_SECONDS),
    ):
        seen: list[str] = []
        async for step in watch(role, channel):
            if step.phase == "starting":
                continue
            late = await watch(role, channel).read()
            assert (late.phase, late.failure) == (step.phase, "")
            steps[len(seen)].set()
            seen.append(step.phase)
        assert seen == ["importing torch", "loading weights", "testing"]
        await wait_serving(channel)
        assert [step async for step in watch(role, channel)] == [], "the startup is over"
    logged = [record.message for record in caplog.records if record.name == "specpool.worker.backend"]
    assert logged == seen


@pytest.mark.parametrize(
    ("error", "reason"), [(OSError("no such file: model.gguf"), "no such file: model.gguf"), (KeyError(), "KeyError")]
)
async def test_a_failed_startup_tells_its_watchers_the_reason(
    error: Exception, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    watched = threading.Event()

    def load(report: Report) -> Any:
        report("loading weights")
        assert watched.wait(PATIENCE_SECONDS)
        raise error

    async with (
        worker_process(TARGET, load, monkeypatch) as started,
        grpc.aio.insecure_channel(started.address) as channel,
        asyncio.timeout(PATIENCE_SECONDS),
    ):
        steps = []
        async for step in watch(TARGET, channel):
            watched.set()
            steps.append((step.phase, step.failure))
        assert steps[-1] == ("loading weights", reason)
        assert {failure for _, failure in steps[:-1]} == {""}
        await asyncio.wait([started.task])
    assert type(started.task.exception()) is type(error)


async def test_a_drain_ends_the_watches_of_a_startup() -> None:
    finish = threading.Event()
    host = WorkerHost(lambda report: finish.wait(PATIENCE_SECONDS))  # type: ignore[arg-type, return-value]
    loading = asyncio.create_task(host.load())
    try:
        async with asyncio.timeout(PATIENCE_SECONDS):
            phases = host.startup.watch()
            assert await anext(phases) == ("starting", "")
            host.drain()
            assert [step async for step in phases] == []
    finally:
        finish.set()
        await asyncio.wait([loading])
        host.close()
