"""Worker processes that are killed and restarted during a generation: the stream continues with the same tokens."""

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from coordinator.config.settings import CoordinatorSettings
from coordinator.server import CoordinatorServer
from specpool.cli.processes import free_port
from specpool.client import AsyncClient
from specpool.rpc.security.channel import open_channel
from specpool.v1 import generation_pb2 as pb

PROMPT = tuple(range(40, 60))
MAX_TOKENS = 300


class WorkerProcess:
    """A worker on a port of its own, as an operator runs it."""

    def __init__(self, module: str, model: Path) -> None:
        self.port = free_port()
        self._command = [
            sys.executable,
            "-m",
            module,
            "--model",
            str(model),
            "--port",
            str(self.port),
            "--threads",
            "1",
        ]
        self._process: asyncio.subprocess.Process | None = None

    @property
    def address(self) -> str:
        """Address of the worker."""
        return f"127.0.0.1:{self.port}"

    async def start(self) -> None:
        """Waits until the worker serves."""
        environment = {**os.environ, "GOMP_SPINCOUNT": "30000"}
        self._process = await asyncio.create_subprocess_exec(*self._command, env=environment)
        async with open_channel(self.address) as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            while True:
                with contextlib.suppress(grpc.aio.AioRpcError):
                    health = await stub.Check(health_pb2.HealthCheckRequest())
                    if health.status == health_pb2.HealthCheckResponse.SERVING:
                        return
                await asyncio.sleep(0.05)

    async def end(self, number: signal.Signals) -> int:
        """Sends the signal and waits for the process to end; returns its exit status."""
        assert self._process is not None
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(number)
        return await self._process.wait()


@asynccontextmanager
async def serving(tiny_pair: tuple[Path, Path]) -> AsyncIterator[tuple[AsyncClient, WorkerProcess, WorkerProcess]]:
    """Both workers as processes, a coordinator in this process, and its client."""
    target = WorkerProcess("target_worker.server", tiny_pair[0])
    draft = WorkerProcess("draft_worker.server", tiny_pair[1])
    await asyncio.gather(target.start(), draft.start())
    settings = CoordinatorSettings(
        port=0,
        drain_seconds=0,
        target_address=target.address,
        draft_address=draft.address,
        default_max_tokens=MAX_TOKENS,
    )
    process = CoordinatorServer(settings)
    try:
        port = await process.start()
        await process.coordinator.target.wait_ready()
        assert process.coordinator.draft is not None
        await process.coordinator.draft.wait_ready()
        async with AsyncClient(f"127.0.0.1:{port}") as client:
            yield client, target, draft
    finally:
        process.server.stop()
        await process.wait_stopped()
        for worker in (target, draft):
            await worker.end(signal.SIGKILL)


def request(k: int) -> pb.GenerateRequest:
    """A generation long enough to be interrupted."""
    return pb.GenerateRequest(
        tokenized=pb.TokenizedInput(input_ids=PROMPT),
        sampling_params=pb.SamplingParams(max_tokens=MAX_TOKENS, ignore_eos=True),
        speculative=pb.SpeculativeParams(num_speculative_tokens=k),
    )


async def test_a_killed_worker_costs_no_token(tiny_pair: tuple[Path, Path]) -> None:
    async with serving(tiny_pair) as (client, target, draft):
        truth = await client.stub.Generate(request(k=0))
        for victim in (target, draft):
            tokens: list[int] = []
            restarted: asyncio.Task[None] | None = None
            async for message in client.stub.GenerateStream(request(k=3)):
                tokens.extend(message.chunk.token_ids)
                if restarted is None and len(tokens) > 20:
                    await victim.end(signal.SIGKILL)
                    restarted = asyncio.create_task(victim.start())
            assert restarted is not None
            await restarted
            assert tokens == list(truth.token_ids)
            assert message.complete.finish_reason == "length"
        await asyncio.sleep(2)  # then the draft is used again
        response = await client.stub.Generate(request(k=3))
        assert response.speculative_decoding.num_draft_tokens > 0
        assert response.token_ids == truth.token_ids
