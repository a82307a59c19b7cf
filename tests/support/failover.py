"""Lose the serving target worker of `specpool up` while clients stream, and time their pauses."""

import asyncio
import os
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import psutil

from benchmarks.runs import current_info
from specpool.client import AsyncClient
from specpool.client.requests import Prompt, make_request
from specpool.v1 import generation_pb2 as pb

POLL_SECONDS, PATIENCE_SECONDS = 0.02, 120.0


@dataclass
class Stream:
    """One streamed answer, and when its chunks arrived."""

    token_ids: list[int] = field(default_factory=list)
    times: list[float] = field(default_factory=list)

    @property
    def longest_gap(self) -> float:
        """Longest time between two chunks, in seconds."""
        return max(later - earlier for earlier, later in pairwise(self.times))


async def read(client: AsyncClient, prompt: Prompt, max_tokens: int, stream: Stream) -> None:
    """Read one answer to its end."""
    request = make_request(prompt, max_tokens=max_tokens, ignore_eos=True)
    async for message in client.stub.GenerateStream(request, timeout=PATIENCE_SECONDS):
        if message.WhichOneof("response") == "chunk":
            stream.times.append(time.perf_counter())
            stream.token_ids.extend(message.chunk.token_ids)


async def read_all(client: AsyncClient, prompts: Sequence[Prompt], max_tokens: int, fault: Any = None) -> list[Stream]:
    """Read answers to all prompts at once. `fault()` is called once every stream has some tokens."""
    streams = [Stream() for _ in prompts]
    reading = [
        asyncio.ensure_future(read(client, prompt, max_tokens, stream))
        for prompt, stream in zip(prompts, streams, strict=True)
    ]
    while fault is not None and not all(len(stream.times) > 3 for stream in streams):  # noqa: ASYNC110 - polls
        await asyncio.sleep(POLL_SECONDS)
    if fault is not None:
        fault()
    await asyncio.gather(*reading)
    return streams


async def until_ready(client: AsyncClient, standby: bool) -> pb.GetServerInfoResponse:
    """Wait until all workers are ready."""
    async with asyncio.timeout(PATIENCE_SECONDS):
        while True:
            info = await client.server_info()
            if info.target.state == "ready" and (not standby or info.standby.state == "ready"):
                return info
            await asyncio.sleep(POLL_SECONDS)


def worker_at(address: str) -> psutil.Process:
    """The worker process of `specpool up`, a child of this process, at an address."""
    port = address.rpartition(":")[2]
    for child in psutil.Process().children():
        arguments = child.cmdline()
        if any(pair == ("--port", port) for pair in pairwise(arguments)):
            return child
    raise LookupError(f"no process at {address}")


async def lose_target(
    client: AsyncClient, prompts: Sequence[Prompt], max_tokens: int, fault: signal.Signals, standby: bool
) -> dict[str, Any]:
    """Read all answers once undisturbed and once while the serving target is lost. Return the pauses."""
    await until_ready(client, standby)
    peace = await read_all(client, prompts, max_tokens)
    info = await until_ready(client, standby)
    victim = worker_at(info.target.address)
    began = 0.0

    def strike() -> None:
        nonlocal began
        os.kill(victim.pid, fault)
        began = time.perf_counter()

    streams = await read_all(client, prompts, max_tokens, strike)
    taken_over = (await current_info(client)).target.address != info.target.address
    if fault is not signal.SIGKILL and victim.is_running():
        victim.kill()
    await until_ready(client, standby)
    gaps = [stream.longest_gap for stream in streams]
    return {
        "quiet_gap_s": round(max(stream.longest_gap for stream in peace), 3),
        "first_pause_s": round(min(gaps), 3),
        "pause_s": round(max(gaps), 3),
        "back_s": round(time.perf_counter() - began, 1),
        "took_over": taken_over,
        "equal": [stream.token_ids for stream in streams] == [stream.token_ids for stream in peace],
    }
