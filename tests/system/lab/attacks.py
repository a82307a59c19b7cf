"""Measure the cost of hostile clients: a well-behaved client's latency, and the coordinator's memory.

    make attacks ATTACKS="--seconds 6"

Coordinator, fake target, attacker and the well-behaved client are separate processes on loopback sockets. Exit status
1: an answer was wrong. The last line printed is JSON.
"""

import argparse
import asyncio
import statistics
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from itertools import count
from multiprocessing import get_context
from typing import Any

import grpc
import psutil
from lab.load import Case, Load, Tokens

from benchmarks.cost.fakes import start_coordinator, start_fakes, wait_ready
from benchmarks.report import finish, progress, show
from specpool.client import AsyncClient
from specpool.healthcheck import seconds
from specpool.rpc.security.channel import open_channel
from specpool.testing import FakeTarget
from specpool.v1 import generation_pb2 as pb
from specpool.v1 import generation_pb2_grpc

PORT = 50059
ATTACKER, CLIENT = f"127.0.0.1:{PORT}", f"[::1]:{PORT}"
"""Two addresses, which the coordinator sees as two clients."""
PASS_SECONDS, PAUSE_SECONDS, SAMPLE_SECONDS = 0.005, 0.05, 0.02
MAX_MODEL_LEN = 131_072
LARGEST = 2**20 - 1024
"""Bytes of the largest text that the coordinator accepts by default."""
TOKENS = 8

Send = Callable[[grpc.aio.Channel], Awaitable[Any]]


def generate(params: pb.SamplingParams | None = None, **fields: Any) -> Send:
    """One call of `Generate`, with a short prompt by default."""
    message = pb.GenerateRequest(sampling_params=params or pb.SamplingParams(max_tokens=TOKENS), **fields)
    if message.WhichOneof("input") is None:
        message.tokenized.input_ids.extend([1, 2, 3])
    return lambda channel: generation_pb2_grpc.GenerationServiceStub(channel).Generate(message, timeout=60)


def chat(messages: int, characters: int) -> Send:
    """One call with a conversation of equal messages."""
    return generate(chat=pb.ChatInput(messages=[pb.ChatMessage(role="user", content="x" * characters)] * messages))


def hostile_stops() -> Send:
    """One call with stop strings that keep matching in part, and tokens that never complete a character."""
    params = pb.SamplingParams(max_tokens=4000, stop=["\ufffd" * 255 + str(i) for i in range(10)], ignore_eos=True)
    params.logit_bias.update(dict.fromkeys(range(148, 180), 90.0))
    return generate(params)


async def read_nothing(channel: grpc.aio.Channel) -> None:
    """A stream that is never read."""
    params = pb.SamplingParams(max_tokens=100_000, ignore_eos=True)
    message = pb.GenerateRequest(tokenized=pb.TokenizedInput(input_ids=[5]), sampling_params=params)
    call = generation_pb2_grpc.GenerationServiceStub(channel).GenerateStream(message, timeout=5)
    await call.wait_for_connection()
    await asyncio.sleep(4)
    call.cancel()


LONG_PROMPT = pb.TokenizedInput(input_ids=[7] * 100_000)
MANY_SAMPLES = pb.SamplingParams(n=64, temperature=1.0, max_tokens=200)
ATTACKS: dict[str, tuple[int, Callable[[], Send]]] = {
    "2,000 calls at once": (2000, generate),
    "60 largest messages": (60, lambda: generate(text="y " * (LARGEST // 2))),
    "60 messages that are too large": (60, lambda: generate(text="y" * 4 * LARGEST)),
    "6 chats of a million characters": (6, lambda: chat(1000, 1000)),
    "6 chats of 200,000 empty messages": (6, lambda: chat(200_000, 0)),
    "16 prompts of 100,000 tokens": (16, lambda: generate(tokenized=LONG_PROMPT)),
    "64 samples": (1, lambda: generate(MANY_SAMPLES)),
    "16 requests with hostile stop strings": (16, hostile_stops),
    "32 streams that are never read": (32, lambda: read_nothing),
}
"""Number of calls at once, and the call."""


def attack(name: str) -> dict[str, int]:
    """Run an attack in this process. Return the number of calls by status."""
    return asyncio.run(_attack(*ATTACKS[name]))


async def _attack(calls: int, make: Callable[[], Send]) -> dict[str, int]:
    send = make()
    async with open_channel(ATTACKER) as channel:
        ended = await asyncio.gather(*(send(channel) for _ in range(calls)), return_exceptions=True)
    codes = [end.code().name if isinstance(end, grpc.aio.AioRpcError) else type(end).__name__ for end in ended]
    return dict(Counter("OK" if code in ("GenerateResponse", "NoneType") else code for code in codes))


def well_behaved_cases() -> Iterator[Case]:
    """An endless series of requests for eight tokens."""
    target, params = FakeTarget(), pb.SamplingParams(max_tokens=TOKENS, ignore_eos=True)
    for number in count(1):
        prompt = [number % 256, 1, 2]
        request = pb.GenerateRequest(tokenized=pb.TokenizedInput(input_ids=prompt), sampling_params=params)
        yield Case(request, expected=target.continuation(prompt, TOKENS))


async def measure(coordinator: psutil.Process, seconds: float, attacking: Callable[[], Any] | None) -> dict[str, Any]:
    """The well-behaved client's figures and the coordinator's memory, for `seconds` or until the attack ends."""
    memory = [coordinator.memory_info().rss]

    async def watch() -> None:
        while True:
            memory.append(coordinator.memory_info().rss)
            await asyncio.sleep(SAMPLE_SECONDS)

    async with AsyncClient(CLIENT) as client:

        async def send(case: Case) -> Tokens:
            prompt = list(case.request.tokenized.input_ids)
            answer = await client.generate(prompt, max_tokens=TOKENS, ignore_eos=True, timeout_seconds=60)
            return {0: list(answer.token_ids)}

        load = Load(send, well_behaved_cases(), pause=PAUSE_SECONDS)
        asking, watching = asyncio.create_task(load.run()), asyncio.create_task(watch())
        statuses = attacking() if attacking is not None else None
        await asyncio.sleep(seconds)
        answered = await statuses if statuses is not None else {}
        load.stop()
        await asking
        watching.cancel()
    latencies, outcomes = load.tally.latencies, load.tally.outcomes
    p95 = statistics.quantiles(latencies, n=20)[-1] if len(latencies) > 1 else latencies[0]
    return {
        "requests": len(latencies),
        "median_ms": round(statistics.median(latencies) * 1000, 1),
        "p95_ms": round(p95 * 1000, 1),
        "wrong": outcomes["wrong"],
        "failed": outcomes.total() - outcomes["wrong"] - outcomes["answered"],
        "growth_mib": round((max(memory) - memory[0]) / 2**20, 1),
        "statuses": answered,
    }


async def measure_all(names: Iterable[str], pid: int, seconds: float) -> list[dict[str, Any]]:
    """A row without an attack, and one for each attack."""
    coordinator = psutil.Process(pid)
    async with AsyncClient(CLIENT) as client:
        await wait_ready(client, draft=False)
    await measure(coordinator, 1, None)  # warms up
    rows = [{"attack": "none", **await measure(coordinator, seconds, None)}]
    loop = asyncio.get_running_loop()
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as attackers:
        for name in progress(list(names), "attacks"):
            row = await measure(coordinator, seconds, lambda name=name: loop.run_in_executor(attackers, attack, name))
            rows.append({"attack": name, **row})
    return rows


def main() -> None:
    """Parse the command line and run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=seconds, default=6.0, help="minimum duration of a measurement")
    parser.add_argument("--only", choices=ATTACKS, help="one attack; default: all")
    options = parser.parse_args()
    with ExitStack() as stack:
        target, _ = start_fakes(stack, "--max-model-len", str(MAX_MODEL_LEN), "--pass-ms", str(1000 * PASS_SECONDS))
        coordinator = start_coordinator(stack, PORT, target, None, "--host", "::")
        rows = asyncio.run(measure_all([options.only] if options.only else ATTACKS, coordinator.pid, options.seconds))
    show("a well-behaved client under attack", rows)
    finish("attacks", {"rows": rows}, None)
    raise SystemExit(any(row["wrong"] for row in rows))


if __name__ == "__main__":
    main()
