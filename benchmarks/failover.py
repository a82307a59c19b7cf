"""Measure the pause of client streams when the target worker is killed or stopped, with and without a standby.

    python -m benchmarks.failover [--streams 1 16] [--faults kill stop] [--max-tokens 128] [--target DIR --draft DIR]

`pause_s` is the longest time without a token of any stream, `first_pause_s` that of the first stream to continue, and
`quiet_gap_s` the longest one without a fault. `back_s` is the time from the fault until the lost worker is ready
again. The last line printed is JSON. Exit status 1: an answer changed.
"""

import argparse
import asyncio
import os
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil

from benchmarks.prompts import add_prompts, load_prompts
from benchmarks.report import finish, parser_of, show, whole
from benchmarks.server_info import current_info
from specpool.cli.up import running
from specpool.cli.up_settings import UpSettings
from specpool.client import AsyncClient
from specpool.client.requests import Prompt, make_request
from specpool.v1 import generation_pb2 as pb

FAULTS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}
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


async def measure(options: argparse.Namespace, standby: bool) -> list[dict[str, Any]]:
    """One row per fault and number of streams, all with the same processes."""
    settings = UpSettings(
        port=0, target=options.target, draft=options.draft, threads=options.threads, standby=standby,
        drain_seconds=1, log_level="error",
    )  # fmt: skip
    lines = load_prompts(options.prompts, max(options.streams))
    prompts = [line.prompt for line in lines]
    rows = []
    began = time.perf_counter()
    async with running(settings) as address, AsyncClient(address) as client:
        start = round(time.perf_counter() - began, 1)
        info = await until_ready(client, standby)
        idle = worker_at(info.standby.address) if standby else None
        resident = round(idle.memory_info().rss / 2**20) if idle is not None else None
        for fault in options.faults:
            for streams in options.streams:
                row = await lose_target(client, prompts[:streams], options.max_tokens, FAULTS[fault], standby)
                labels = {"standby": standby, "fault": fault, "streams": streams, "start_s": start}
                rows.append({**labels, **row, "idle_standby_mib": resident})
    return rows


def main() -> None:
    """Parse the command line and run the benchmark."""
    parser = parser_of(__doc__)
    parser.add_argument("--target", help="target model; default: the embedded pair")
    parser.add_argument("--draft")
    add_prompts(parser)
    parser.add_argument("--streams", type=whole(1, 256), nargs="+", default=[1, 8])
    parser.add_argument("--faults", choices=FAULTS, nargs="+", default=list(FAULTS))
    parser.add_argument("--max-tokens", type=whole(16, 100_000), default=128)
    parser.add_argument("--threads", type=whole(1, 1024), default=UpSettings().threads)
    parser.add_argument("--output", type=Path, help="folder for failover.json")
    options = parser.parse_args()
    rows = [row for standby in (False, True) for row in asyncio.run(measure(options, standby))]
    show("pause of streams when the target is lost", rows)
    finish("failover", {"max_tokens": options.max_tokens, "rows": rows}, options.output)
    raise SystemExit(not all(row["equal"] for row in rows))


if __name__ == "__main__":
    main()
