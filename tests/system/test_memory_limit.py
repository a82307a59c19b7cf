"""Real workers keep to their memory limit when every slot and position is in use."""

import asyncio
import re
import sys
from pathlib import Path

import pytest
from lab.processes import running

from specpool.cli.processes import Service
from specpool.client import AsyncClient
from specpool.engine.models.embedded_pair import EMBEDDED_DRAFT, EMBEDDED_TARGET
from specpool.v1 import generation_pb2 as pb

MIB = 2**20
SLOTS, LENGTH = 4, 1200
TOO_SMALL, ROOM = 128 * MIB, 64 * MIB
"""Limit that a worker refuses; memory added to the limit that it then asks for, which varies by machine."""
ALLOWED = 1.03
"""Maximum memory as a share of the limit."""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.real_pair,
    pytest.mark.skipif(sys.platform != "linux", reason="reads /proc"),
]


def peak_bytes(service: Service) -> int:
    """The most memory that a process has had resident."""
    assert service.process is not None
    status = Path(f"/proc/{service.process.pid}/status").read_text()
    match = re.search(r"VmHWM:\s+(\d+) kB", status)
    assert match is not None
    return 1024 * int(match[1])


def request(number: int) -> pb.GenerateRequest:
    """A request of full length that asks for as many rows and log-probabilities as it may."""
    params = pb.SamplingParams(max_tokens=24, ignore_eos=True, logprobs=20, temperature=1.0, seed=number, top_p=0.9)
    return pb.GenerateRequest(
        tokenized=pb.TokenizedInput(input_ids=[(7 * number + i) % 40_000 for i in range(LENGTH - 24)]),
        sampling_params=params,
        speculative=pb.SpeculativeParams(num_speculative_tokens=16),
    )


async def least_limit(flags: list[str]) -> int:
    """The limit that a target worker names when it refuses one that is too small."""
    arguments = ["--model", EMBEDDED_TARGET, "--port", "0", "--max-sequences", str(SLOTS), *flags]
    worker = Service(
        "target worker", "target_worker.server", [*arguments, "--memory-limit", str(TOO_SMALL)], "unused:1"
    )
    await worker.start()
    assert worker.process is not None
    ending = worker.log.ending(await worker.process.wait())
    match = re.search(r"raise --memory-limit to (\d+)MiB", ending)
    assert match is not None, ending
    return int(match[1]) * MIB


async def test_worker_keeps_to_its_memory_limit() -> None:
    flags = ["--max-model-len", str(LENGTH), "--grammar-memory", "0"]
    limit = await least_limit(flags) + ROOM
    flags, models = [*flags, "--memory-limit", str(limit)], (EMBEDDED_TARGET, EMBEDDED_DRAFT)
    async with running(*models, SLOTS, worker_flags=flags) as processes, AsyncClient(processes.address) as client:
        target, draft, _ = processes.services
        await asyncio.gather(*(client.stub.Generate(request(number)) for number in range(SLOTS)))
        for worker in (target, draft):
            assert peak_bytes(worker) <= ALLOWED * limit, worker.name
        assert peak_bytes(target) > 0.8 * limit  # the limit is put to use


async def test_a_target_worker_and_the_draft_that_it_carries_share_its_limit() -> None:
    flags = ["--max-model-len", str(LENGTH), "--grammar-memory", "0", "--draft", EMBEDDED_DRAFT]
    limit = await least_limit(flags) + ROOM
    flags += ["--memory-limit", str(limit)]
    async with running(EMBEDDED_TARGET, None, SLOTS, worker_flags=flags) as processes:
        async with AsyncClient(processes.address) as client:
            await asyncio.gather(*(client.stub.Generate(request(number)) for number in range(SLOTS)))
        target, _ = processes.services
        assert peak_bytes(target) <= ALLOWED * limit
        assert peak_bytes(target) > 0.8 * limit
