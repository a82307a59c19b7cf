"""`specpool up`: coordinator, draft worker and target worker on this machine, as three processes."""

import asyncio
import contextlib
import json
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from pydantic import Field

from rpc.channel import open_channel
from rpc.settings import ENV_PREFIX, ServerSettings

# What a process gets, after the drain that it was promised, before it is killed.
KILL_AFTER_SECONDS = 5.0
RESTART_SECONDS = 1.0
PROBE_SECONDS = 0.2
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class UpSettings(ServerSettings):
    """Runs coordinator, draft worker and target worker on this machine. Without models: the embedded pair."""

    owns_environment = False

    port: int = Field(50050, ge=0, le=65535, description="port of the coordinator; 0 lets the system choose")
    target: str | None = Field(
        None, description="target model: hub id, folder or GGUF file; default: the embedded pair's"
    )
    draft: str | None = Field(
        None, description='draft model; "none": plain decoding; default: the embedded pair\'s, with its target only'
    )
    target_device: str = Field("auto", description="device of the target")
    draft_device: str = Field("auto", description="device of the draft; with two GPUs name cuda:1")
    threads: int = Field(
        default_factory=lambda: len(os.sched_getaffinity(0)), ge=1, description="CPU threads of each worker"
    )
    window_size: int = Field(16, ge=1, description="sequences generated at a time")
    max_model_len: int = Field(2048, ge=16, description="positions a sequence can have")
    num_speculative_tokens: int = Field(4, ge=0, description="draft tokens per round unless a request says otherwise")


class ProcessFailedError(Exception):
    """A process ended before it served; its own message is above."""


@dataclass
class Service:
    """One of the three processes, started again if it ends after it once served."""

    name: str
    module: str
    arguments: list[str]
    address: str
    process: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        """Starts the process; its log goes to our stderr."""
        self.process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", self.module, *self.arguments, env=worker_environment(), start_new_session=True
        )

    async def wait_serving(self) -> None:
        """Returns when health says SERVING. ProcessFailedError if the process ends before."""
        async with open_channel(self.address) as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            while True:
                assert self.process is not None
                if self.process.returncode is not None:
                    raise ProcessFailedError(f"the {self.name} ended with status {self.process.returncode}")
                with contextlib.suppress(grpc.aio.AioRpcError):
                    response = await stub.Check(health_pb2.HealthCheckRequest(), timeout=PROBE_SECONDS * 5)
                    if response.status == health_pb2.HealthCheckResponse.SERVING:
                        return
                await asyncio.sleep(PROBE_SECONDS)

    async def keep_running(self) -> None:
        """Starts the process again, for ever, whenever it ends."""
        while True:
            assert self.process is not None
            status = await self.process.wait()
            print(f"specpool up: the {self.name} ended with status {status}; starting it again", file=sys.stderr)
            await asyncio.sleep(RESTART_SECONDS)
            await self.start()

    async def stop(self, drain_seconds: float) -> None:
        """Lets the process drain, and kills it if that takes too long."""
        if self.process is None or self.process.returncode is not None:
            return
        self.process.terminate()
        try:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.process.wait(), drain_seconds + KILL_AFTER_SECONDS)
        finally:  # a second Ctrl-C comes here at once
            if self.process.returncode is None:
                self.process.kill()
                await self.process.wait()


def worker_environment() -> dict[str, str]:
    """The environment of the processes: no settings of ours, and threads that sleep rather than spin.

    Target and draft take turns. Threads that spin while the other works take the cores from it (README, "Decisions").
    """
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(ENV_PREFIX)}
    return {"OMP_WAIT_POLICY": "PASSIVE", "HF_HUB_DISABLE_PROGRESS_BARS": "1", **inherited}


@asynccontextmanager
async def running(settings: UpSettings) -> AsyncIterator[str]:
    """All processes serving; yields the coordinator's address. ProcessFailedError.

    SIGTERM and Ctrl-C cancel the calling task, so that no process is left behind.
    """
    caller = asyncio.current_task()
    assert caller is not None
    for number in STOP_SIGNALS:
        asyncio.get_running_loop().add_signal_handler(number, caller.cancel)
    services = _services(settings, *await _models(settings))
    watchers: list[asyncio.Task[None]] = []
    try:
        for service in services:
            await service.start()
        await asyncio.gather(*(service.wait_serving() for service in services))
        watchers = [asyncio.create_task(service.keep_running()) for service in services]
        yield services[-1].address
    finally:
        for watcher in watchers:
            watcher.cancel()
        # The coordinator first: it drains with the help of the workers.
        for service in reversed(services):
            await service.stop(settings.drain_seconds)
        for number in STOP_SIGNALS:
            asyncio.get_running_loop().remove_signal_handler(number)


def up(settings: UpSettings) -> int:
    """Runs the command until SIGTERM or Ctrl-C; returns its exit status."""
    try:
        asyncio.run(_serve(settings))
    except ProcessFailedError as error:
        print(f"specpool up: {error}", file=sys.stderr)
        return 1
    except asyncio.CancelledError:  # a signal asked us to stop
        return 0
    return 0


async def _serve(settings: UpSettings) -> None:
    async with running(settings) as address:
        print(f"specpool is serving at {address}", flush=True)
        await asyncio.Event().wait()


async def _models(settings: UpSettings) -> tuple[str, str | None]:
    """Target and draft to run; the embedded pair, made if need be, where the settings name none."""
    draft = None if settings.draft == "none" else settings.draft
    if settings.target is not None:
        return settings.target, draft
    # In a process of its own, because making the pair needs torch and this process does not.
    making = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "engine.embedded_pair", stdout=asyncio.subprocess.PIPE
    )
    printed, _ = await making.communicate()
    if making.returncode != 0:
        raise ProcessFailedError("the embedded pair could not be made")
    pair = json.loads(printed)
    return pair["target"], pair["draft"] if settings.draft is None else draft


def _services(settings: UpSettings, target: str, draft: str | None) -> list[Service]:
    shared = ["--max-model-len", str(settings.max_model_len), "--max-sequences", str(settings.window_size)]
    shared += ["--threads", str(settings.threads), *_server_flags(settings)]
    workers = [_worker("target", target, settings.target_device, shared)]
    if draft is not None:
        workers.append(_worker("draft", draft, settings.draft_device, shared))
    port = settings.port or free_port()
    arguments = ["--host", settings.host, "--port", str(port), "--window-size", str(settings.window_size)]
    arguments += ["--max-batch-size", str(settings.window_size), *_server_flags(settings)]
    arguments += ["--num-speculative-tokens", str(settings.num_speculative_tokens)]
    for worker in workers:
        arguments += [f"--{worker.name.split()[0]}-address", worker.address]
    return [*workers, Service("coordinator", "coordinator.server", arguments, f"{_reachable(settings.host)}:{port}")]


def _worker(kind: str, model: str, device: str, shared: list[str]) -> Service:
    port = free_port()
    arguments = ["--model", model, "--device", device, "--port", str(port), *shared]
    return Service(f"{kind} worker", f"{kind}_worker.server", arguments, f"127.0.0.1:{port}")


def _server_flags(settings: UpSettings) -> list[str]:
    return ["--drain-seconds", str(settings.drain_seconds), "--log-level", settings.log_level]


def _reachable(host: str) -> str:
    return "127.0.0.1" if host == "0.0.0.0" else host


def free_port() -> int:
    """A port that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
