"""A worker process that ends during a generation: the stream continues with the same tokens."""

import asyncio
from pathlib import Path

import pytest
from lab.failing_device import BROKEN, FAILURES, NO_MEMORY
from lab.processes import ROLES, running
from secure_service import until

from benchmarks.cost.fakes import wait_ready
from specpool.cli.processes import Service
from specpool.client import AsyncClient
from specpool.v1 import generation_pb2 as pb

MAX_TOKENS = 300
PLAIN = pb.SamplingParams(max_tokens=MAX_TOKENS, ignore_eos=True)
REASONING = pb.SamplingParams(
    max_tokens=MAX_TOKENS,
    temperature=1.0,
    seed=1,
    regex=r"( [a-z]{1,9},){400}",
    constraint_after_reasoning=True,
    max_thinking_tokens=40,
)
TAGS = ("--reasoning-tags", "[,]")


def request(k: int, params: pb.SamplingParams = PLAIN) -> pb.GenerateRequest:
    """A generation long enough to be interrupted. The prompt has a "[" and no "]"."""
    return pb.GenerateRequest(
        tokenized=pb.TokenizedInput(input_ids=range(40, 60)),
        sampling_params=params,
        speculative=pb.SpeculativeParams(num_speculative_tokens=k),
    )


async def kill(worker: Service) -> None:
    assert worker.process is not None
    worker.process.kill()
    await worker.process.wait()


async def restart(worker: Service) -> None:
    await worker.start()
    await worker.wait_serving()


@pytest.mark.slow
@pytest.mark.parametrize("params", [PLAIN, REASONING], ids=["plain", "reasoning"])
async def test_killed_worker_costs_no_token(tiny_pair: tuple[Path, Path], params: pb.SamplingParams) -> None:
    starting = running(*tiny_pair, slots=4, coordinator_flags=TAGS)
    async with starting as processes, AsyncClient(processes.address) as client:
        await wait_ready(client)
        truth = await client.stub.Generate(request(0, params))
        assert truth.starts_in_reasoning
        for victim in processes.services[:2]:
            tokens: list[int] = []
            restarting: asyncio.Task[None] | None = None
            async for message in client.stub.GenerateStream(request(3, params)):
                tokens.extend(message.chunk.token_ids)
                if restarting is None and len(tokens) > 20:
                    await kill(victim)
                    restarting = asyncio.create_task(restart(victim))
            assert restarting is not None
            await restarting
            assert tokens == list(truth.token_ids)
            assert message.complete.finish_reason == "length"
        await wait_ready(client)
        response = await client.stub.Generate(request(3, params))
        assert response.speculative_decoding.num_draft_tokens > 0
        assert response.token_ids == truth.token_ids


@pytest.mark.slow
@pytest.mark.parametrize("error", [BROKEN, NO_MEMORY])
async def test_failing_device_ends_the_worker_without_changing_tokens(
    error: str, tiny_pair: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(FAILURES, str(tmp_path))
    starting = running(*tiny_pair, slots=4, devices_can_fail=True)
    async with starting as processes, AsyncClient(processes.address) as client:
        await wait_ready(client)
        truth = await client.stub.Generate(request(k=0))
        supervising = [asyncio.create_task(worker.keep_running()) for worker in processes.services[:2]]
        for victim, role, k in zip(processes.services[:2], ROLES, (0, 3), strict=True):
            process = victim.process
            assert process is not None
            begun, ended = asyncio.Event(), asyncio.create_task(process.wait())
            streams = [asyncio.create_task(tokens_of_stream(client, k, begun)) for _ in range(4)]
            await begun.wait()
            (tmp_path / "new").write_text(error)
            (tmp_path / "new").rename(tmp_path / role)
            assert await ended == 1
            assert await asyncio.gather(*streams) == [list(truth.token_ids)] * 4
            await until(lambda process=process, victim=victim: victim.process is not process)
            await victim.wait_serving()
            await wait_ready(client)
        response = await client.stub.Generate(request(k=3))
        assert response.speculative_decoding.num_draft_tokens > 0
        assert dict((await client.server_info()).counters.finished) == {"length": 10}
        for task in supervising:
            task.cancel()


async def tokens_of_stream(client: AsyncClient, k: int, begun: asyncio.Event) -> list[int]:
    """Return the tokens of a generation. `begun`: set after the first 20."""
    tokens: list[int] = []
    async for message in client.stub.GenerateStream(request(k)):
        tokens.extend(message.chunk.token_ids)
        if len(tokens) > 20:
            begun.set()
    return tokens
