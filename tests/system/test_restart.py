"""Killing a worker process during a generation: the stream continues with the same tokens."""

import asyncio
from pathlib import Path

import pytest
from lab.processes import running

from benchmarks.cost.fakes import wait_ready
from specpool.cli.processes import Service
from specpool.client import AsyncClient
from specpool.v1 import generation_pb2 as pb

MAX_TOKENS = 300


def request(k: int) -> pb.GenerateRequest:
    """A generation long enough to be interrupted."""
    return pb.GenerateRequest(
        tokenized=pb.TokenizedInput(input_ids=range(40, 60)),
        sampling_params=pb.SamplingParams(max_tokens=MAX_TOKENS, ignore_eos=True),
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
async def test_killed_worker_costs_no_token(tiny_pair: tuple[Path, Path]) -> None:
    async with running(*tiny_pair, slots=4) as processes, AsyncClient(processes.address) as client:
        await wait_ready(client)
        truth = await client.stub.Generate(request(k=0))
        for victim in processes.services[:2]:
            tokens: list[int] = []
            restarting: asyncio.Task[None] | None = None
            async for message in client.stub.GenerateStream(request(k=3)):
                tokens.extend(message.chunk.token_ids)
                if restarting is None and len(tokens) > 20:
                    await kill(victim)
                    restarting = asyncio.create_task(restart(victim))
            assert restarting is not None
            await restarting
            assert tokens == list(truth.token_ids)
            assert message.complete.finish_reason == "length"
        await wait_ready(client)
        response = await client.stub.Generate(request(k=3))
        assert response.speculative_decoding.num_draft_tokens > 0
        assert response.token_ids == truth.token_ids
