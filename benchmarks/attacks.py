"""Costs of hostile clients: latency of a well-behaved client, and memory of the coordinator, under attack.

    python -m benchmarks.attacks [--seconds 6] [--only NAME]

Coordinator, fake target, attacker and the well-behaved client are separate processes that connect over loopback
sockets. The last line printed is JSON; exit status 1 if an answer was wrong.
"""

import argparse
import asyncio
import json
import statistics
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from functools import partial
from multiprocessing import get_context
from typing import Any

import grpc
import psutil

from benchmarks.coordinator_cost import start_process, wait_ready
from benchmarks.report import finish, progress, show
from specpool.client import AsyncClient
from specpool.healthcheck import seconds
from specpool.rpc.security.channel import open_channel
from specpool.testing import FakeTarget
from specpool.v1 import generation_pb2 as pb
from specpool.v1 import generation_pb2_grpc

PASS_SECONDS = 0.005
PAUSE_SECONDS = 0.05
MAX_MODEL_LEN = 131_072
LARGEST = 2**20 - 1024
"""Bytes of the largest request that the coordinator accepts by default, less some for its other fields."""

PORT = 50059

Attacking = Callable[[], asyncio.Future[dict[str, int]]]
Send = Callable[[grpc.aio.Channel], Awaitable[Any]]


def request(**fields: Any) -> pb.GenerateRequest:
    """A request for a few tokens, with these fields; without an input it gets a short prompt."""
    message = pb.GenerateRequest(sampling_params=pb.SamplingParams(max_tokens=8), **fields)
    if message.WhichOneof("input") is None:
        message.tokenized.input_ids.extend([1, 2, 3])
    return message


def chat(messages: int, characters: int) -> pb.GenerateRequest:
    """A conversation of equal messages."""
    message = pb.ChatMessage(role="user", content="x" * characters)
    return request(chat=pb.ChatInput(messages=[message] * messages))


def generate(message: pb.GenerateRequest) -> Send:
    """One call of `Generate`."""
    return lambda channel: generation_pb2_grpc.GenerationServiceStub(channel).Generate(message, timeout=60)


async def read_nothing(channel: grpc.aio.Channel) -> None:
    """A stream that is never read."""
    endless = pb.SamplingParams(max_tokens=100_000, ignore_eos=True)
    message = pb.GenerateRequest(tokenized=pb.TokenizedInput(input_ids=[5]), sampling_params=endless)
    call = generation_pb2_grpc.GenerationServiceStub(channel).GenerateStream(message, timeout=5)
    await call.wait_for_connection()
    await asyncio.sleep(4)
    call.cancel()


def many_samples() -> pb.GenerateRequest:
    """A request for the greatest number of samples."""
    message = request()
    message.sampling_params.MergeFrom(pb.SamplingParams(n=64, temperature=1.0, max_tokens=200))
    return message


def hostile_stops() -> pb.GenerateRequest:
    """A request with stop strings that begin over and over again, and tokens that never make a character."""
    message = request()
    bytes_that_continue = dict.fromkeys(range(148, 180), 90.0)
    params = pb.SamplingParams(max_tokens=4000, stop=["\ufffd" * 255 + str(i) for i in range(10)], ignore_eos=True)
    params.logit_bias.update(bytes_that_continue)
    message.sampling_params.MergeFrom(params)
    return message


LONG_PROMPT = pb.TokenizedInput(input_ids=[7] * 100_000)
ATTACKS: dict[str, tuple[int, Callable[[], Send]]] = {
    "2,000 calls at once": (2000, lambda: generate(request())),
    "60 largest messages": (60, lambda: generate(request(text="y " * (LARGEST // 2)))),
    "60 messages that are too large": (60, lambda: generate(request(text="y" * 4 * LARGEST))),
    "6 chats of a million characters": (6, lambda: generate(chat(1000, 1000))),
    "6 chats of 200,000 empty messages": (6, lambda: generate(chat(200_000, 0))),
    "16 prompts of 100,000 tokens": (16, lambda: generate(request(tokenized=LONG_PROMPT))),
    "64 samples": (1, lambda: generate(many_samples())),
    "16 requests with hostile stop strings": (16, lambda: generate(hostile_stops())),
    "32 streams that are never read": (32, lambda: read_nothing),
}


def attack(name: str) -> dict[str, int]:
    """Makes the calls of an attack at once; returns their number by status."""
    return asyncio.run(_attack(*ATTACKS[name]))


async def _attack(calls: int, make: Callable[[], Send]) -> dict[str, int]:
    send = make()
    async with open_channel(f"127.0.0.1:{PORT}") as channel:  # to the server, another client than the one at [::1]
        ended = await asyncio.gather(*(send(channel) for _ in range(calls)), return_exceptions=True)
    codes = [end.code().name if isinstance(end, grpc.aio.AioRpcError) else type(end).__name__ for end in ended]
    return dict(Counter("OK" if code in ("GenerateResponse", "NoneType") else code for code in codes))


class WellBehaved:
    """A client that asks for eight tokens, again and again, and knows what it must get."""

    def __init__(self, client: AsyncClient) -> None:
        self._client, self._target = client, FakeTarget()
        self.latencies: list[float] = []
        self.wrong = self.failed = 0
        self.enough = False

    async def ask(self) -> None:
        """Sends one request after the other until `enough` is set."""
        number = 0
        while not self.enough:
            number += 1
            prompt = [number % 256, 1, 2]
            began = time.perf_counter()
            try:
                response = await self._client.generate(prompt, max_tokens=8, ignore_eos=True, timeout_seconds=60)
                self.wrong += list(response.token_ids) != self._target.continuation(prompt, 8)
            except grpc.aio.AioRpcError:
                self.failed += 1
            self.latencies.append(time.perf_counter() - began)
            await asyncio.sleep(PAUSE_SECONDS)


async def watch(coordinator: psutil.Process, seen: list[int]) -> None:
    """Notes the coordinator's memory, until cancelled."""
    while True:
        seen.append(coordinator.memory_info().rss)
        await asyncio.sleep(0.02)


async def measure(coordinator: psutil.Process, seconds: float, attacking: Attacking | None) -> dict[str, Any]:
    """Figures of the well-behaved client and of the coordinator's memory, over `seconds` or until the attack ends,
    whichever takes longer."""
    async with AsyncClient(f"[::1]:{PORT}") as client:
        one, memory = WellBehaved(client), [coordinator.memory_info().rss]
        asking, watching = asyncio.create_task(one.ask()), asyncio.create_task(watch(coordinator, memory))
        statuses = attacking() if attacking is not None else None
        await asyncio.sleep(seconds)
        answered = await statuses if statuses is not None else {}
        one.enough = True
        await asking  # includes the request under way
        watching.cancel()
    slowest = statistics.quantiles(one.latencies, n=20)[-1] if len(one.latencies) > 1 else one.latencies[0]
    return {
        "requests": len(one.latencies),
        "median_ms": round(statistics.median(one.latencies) * 1000, 1),
        "p95_ms": round(slowest * 1000, 1),
        "wrong": one.wrong,
        "failed": one.failed,
        "growth_mib": round((max(memory) - memory[0]) / 2**20, 1),
        "statuses": answered,
    }


async def measure_all(names: Iterable[str], pid: int, seconds: float) -> list[dict[str, Any]]:
    """A row without an attack, and one for each attack."""
    coordinator = psutil.Process(pid)
    async with AsyncClient(f"[::1]:{PORT}") as client:
        await wait_ready(client, draft=False)
    await measure(coordinator, 1, None)  # warms up
    rows = [{"attack": "none", **await measure(coordinator, seconds, None)}]
    loop = asyncio.get_running_loop()
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as attackers:
        for name in progress(list(names), "attacks"):
            attacking = partial(loop.run_in_executor, attackers, attack, name)
            row = await measure(coordinator, seconds, attacking)
            rows.append({"attack": name, **row})
    return rows


async def serve_fake() -> None:
    """Serves a fake target until killed; prints its address."""
    target = FakeTarget(slots=64, max_model_len=MAX_MODEL_LEN, pass_seconds=lambda rows: PASS_SECONDS)
    print(json.dumps(await target.start()), flush=True)
    await asyncio.Event().wait()


def main() -> None:
    """Parses the command line, measures, prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=seconds, default=6.0, help="least duration of a measurement")
    parser.add_argument("--only", choices=ATTACKS, help="one attack; default: all")
    parser.add_argument("--serve-fake", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve_fake:
        asyncio.run(serve_fake())
        return
    with ExitStack() as stack:
        fake = start_process(stack, "-m", "benchmarks.attacks", "--serve-fake")
        assert fake.stdout is not None
        flags = ["--target-address", json.loads(fake.stdout.readline()), "--host", "::", "--port", str(PORT)]
        coordinator = start_process(stack, "-m", "coordinator.server", *flags, "--log-level", "error")
        names = [options.only] if options.only else list(ATTACKS)
        rows = asyncio.run(measure_all(names, coordinator.pid, options.seconds))
    show("a well-behaved client under attack", rows)
    finish("attacks", {"rows": rows}, None)
    raise SystemExit(any(row["wrong"] for row in rows))


if __name__ == "__main__":
    main()
