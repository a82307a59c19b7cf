"""Cost of the coordinator itself, with fake workers that cost nothing: per round, and per choice of a group.

    python -m benchmarks.coordinator_cost [--sequences 8] [--tokens 200] [--k 4] [--repeats 5]

Coordinator, fakes and client are processes of their own that meet on loopback sockets. The last line printed is JSON.
"""

import argparse
import asyncio
import contextlib
import json
import random
import statistics
import subprocess
import sys
from contextlib import ExitStack

import grpc

from benchmarks.report import add_load_arguments, finish, progress, seconds_of, show
from coordinator.scheduling.capacity import QueueLimits
from coordinator.scheduling.grouping import POLICIES, GroupingLimits, Policy
from coordinator.scheduling.pool import Pool
from coordinator.scheduling.sequence import GenerationRequest, Sequence
from specpool.client import AsyncClient
from specpool.testing import FakeDraft, FakeTarget
from specpool.v1 import generation_pb2 as pb

GOAL_ROUND_MS, GOAL_CHOICE_MS = 2.0, 1.0
POOL_SIZE, CHOICES = 10_000, 1_000
PROMPT_LENGTHS = 20, 2_000


def main() -> None:
    """Parses the command line, measures, prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_load_arguments(parser, tokens=200)
    parser.add_argument("--serve-fakes", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve_fakes:
        asyncio.run(serve_fakes())
        return
    runs = measure_rounds(options)
    result: dict[str, object] = {
        "sequences": options.sequences,
        "num_speculative_tokens": options.k,
        "rounds": sum(run["rounds"] for run in runs),
        **{name: round(statistics.median(run[name] for run in runs), 4) for name in runs[0] if name.endswith("_ms")},
        "goal_round_ms": GOAL_ROUND_MS,
        "choose_group_of_10000_ms": {name: round(measure_choice(name), 5) for name in POLICIES},
        "goal_choice_ms": GOAL_CHOICE_MS,
    }
    show("cost of the coordinator", [{"measure": name, "value": value} for name, value in result.items()])
    finish("coordinator_cost", result, None)


async def serve_fakes() -> None:
    """Serves both fake workers until killed; prints their addresses."""
    target = FakeTarget(slots=64)
    draft = FakeDraft(target, slots=64)
    print(json.dumps([await target.start(), await draft.start()]), flush=True)
    await asyncio.Event().wait()


def measure_rounds(options: argparse.Namespace) -> list[dict[str, float]]:
    """One row per repeat. Each run generates `sequences` answers of `tokens` tokens at once."""
    with ExitStack() as stack:
        fakes = start_process(stack, "-m", "benchmarks.coordinator_cost", "--serve-fakes")
        assert fakes.stdout is not None
        target, draft = json.loads(fakes.stdout.readline())
        address = "127.0.0.1:50058"
        flags = ["--target-address", target, "--draft-address", draft, "--port", address.split(":")[1]]
        start_process(stack, "-m", "coordinator.server", *flags, "--log-level", "error")
        return asyncio.run(_run_all(address, options))


async def _run_all(address: str, options: argparse.Namespace) -> list[dict[str, float]]:
    async with AsyncClient(address) as client:
        await wait_ready(client)
        await run_once(client, options)  # warms up
        bar = progress(range(options.repeats), "rounds with fake workers")
        return [await run_once(client, options) for _ in bar]


async def run_once(client: AsyncClient, options: argparse.Namespace) -> dict[str, float]:
    """Generates all answers at once; returns the number of rounds and milliseconds per round."""
    before = await client.stub.GetServerInfo(pb.GetServerInfoRequest())
    requests = [
        pb.GenerateRequest(
            text=f"prompt {i}",
            sampling_params=pb.SamplingParams(max_tokens=options.tokens, ignore_eos=True),
            speculative=pb.SpeculativeParams(num_speculative_tokens=options.k),
        )
        for i in range(options.sequences)
    ]
    await asyncio.gather(*(client.stub.Generate(request) for request in requests))
    after = await client.stub.GetServerInfo(pb.GetServerInfoRequest())
    rounds = after.counters.rounds - before.counters.rounds
    stage = {
        name: (seconds - before.counters.stage_seconds[name]) * 1000 / rounds
        for name, seconds in after.counters.stage_seconds.items()
    }
    own = {f"{name}_ms": stage[name] for name in ("wire", "schedule")}
    return {"rounds": rounds, "round_ms": sum(own.values()), **own}


async def wait_ready(client: AsyncClient, draft: bool = True) -> None:
    """Waits until the coordinator has its target, and its `draft` if it has one."""
    for _ in range(600):
        with contextlib.suppress(grpc.aio.AioRpcError):  # it is still starting
            info = await client.server_info()
            if info.target.state == "ready" and (info.draft.state == "ready" or not draft):
                return
        await asyncio.sleep(0.1)
    raise SystemExit("the coordinator did not get ready")


def measure_choice(name: str) -> float:
    """Median milliseconds to choose a group of 8 and put it back, in a pool of 10,000 ready sequences."""
    pool = Pool(max_num_seqs=POOL_SIZE, queue=QueueLimits(POOL_SIZE), prefix_caching=False)
    rng = random.Random(0)
    for i in range(POOL_SIZE):
        prompt = (1,) * rng.randint(*PROMPT_LENGTHS)
        pool.submit([Sequence(i, GenerationRequest(str(i), prompt, 1000, frozenset(), 4))])
    pool.admit()
    policy = POLICIES[name](GroupingLimits(max_batch_size=8, min_group_size=4))
    return statistics.median(seconds_of(lambda: _choose(pool, policy)) for _ in range(CHOICES)) * 1000


def _choose(pool: Pool, policy: Policy) -> None:
    group = policy.choose(pool.ready, pool.rounds).sequences
    pool.begin_round(group)
    pool.end_round(group)


def start_process(stack: ExitStack, *arguments: str) -> subprocess.Popen[str]:
    """A Python process that ends with the stack."""
    process = subprocess.Popen([sys.executable, *arguments], stdout=subprocess.PIPE, text=True)
    stack.callback(process.wait)
    stack.callback(process.kill)
    return process


if __name__ == "__main__":
    main()
