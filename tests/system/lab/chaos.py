"""Chaos test: faults of real processes under load, on the embedded pair. Every answer must stay the same.

    make chaos CHAOS="--faults 300 --restarts 10"

Two target and two draft workers are killed, stopped, starved of memory and disk, removed and added, one of each role at
a time, while clients send the same requests again and again: greedy, sampled and constrained ones. The tokens must be
those that plain decoding gave before the first fault. The coordinator is killed, too; clients then send their requests
again. Exit status 1: an answer was wrong or failed, or a process did not recover. The last line printed is JSON.
"""

import argparse
import asyncio
import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import count
from typing import Any

import grpc
from lab.crew import FAULTS, Crew
from lab.load import Case, Load, Pulse, Tokens, ask
from lab.processes import ROLES, running

from benchmarks.report import console, finish, output_folder, progress, show, whole
from specpool.cli.processes import ProcessFailedError
from specpool.client import AsyncClient
from specpool.client.prompts import own_prompts
from specpool.client.requests import make_request
from specpool.engine.models.embedded_pair import EMBEDDED_DRAFT, EMBEDDED_TARGET
from specpool.v1 import generation_pb2 as pb

WORKER_FLAGS = ["--lease-seconds", "10", "--watchdog-seconds", "20"]
PAUSE_SECONDS = 1.0
"""Maximum pause between two faults of a role."""
COUNT = whole(0, 10**6)
VARIANTS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.8, "top_p": 0.95, "seed": 5},
    {"temperature": 1.0, "top_k": 40, "seed": 7, "n": 2, "repetition_penalty": 1.1},
    {"regex": "[A-Z][a-z ]{10,80}[.]"},
]
DRAFT_LENGTHS = (None, None, 1, 4)


def main(arguments: Sequence[str] | None = None) -> None:
    """Parse the command line, run the test, and print what it found."""
    options = parse(arguments)
    try:
        result = asyncio.run(chaos(options))
    except ProcessFailedError as error:
        raise SystemExit(str(error)) from None
    show("recovery, seconds", result["recovery"])
    show("chaos", [{"measure": name, "value": value} for name, value in result.items() if name != "recovery"])
    finish("chaos", result, options.output)
    if result["problems"]:
        raise SystemExit(f"found {len(result['problems'])} problems")


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Options of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", type=COUNT, default=300, help="faults of workers")
    parser.add_argument("--restarts", type=COUNT, default=10, help="times that the coordinator is killed")
    parser.add_argument("--kinds", default=",".join(FAULTS), help="kinds of faults, separated by commas (%(default)s)")
    parser.add_argument("--requests", type=whole(1, 10**6), default=48, help="different requests")
    parser.add_argument("--concurrency", type=whole(1, 10**6), default=6, help="requests in flight")
    parser.add_argument("--max-tokens", type=whole(1, 10**6), default=48, help="tokens of an answer")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=output_folder, help="folder for the result")
    options = parser.parse_args(arguments)
    if unknown := set(options.kinds.split(",")) - FAULTS.keys():
        parser.error(f"--kinds: unknown {', '.join(sorted(unknown))}; known: {', '.join(FAULTS)}")
    return options


async def chaos(options: argparse.Namespace) -> dict[str, Any]:
    """Let faults happen under load."""
    console.print("starting the service")
    pair = (EMBEDDED_TARGET, EMBEDDED_DRAFT)
    flags = ["--max-num-seqs", "8", "--audit-share", "0.05"]
    async with (
        running(*pair, slots=8, coordinator_flags=flags, workers=(2, 2), worker_flags=WORKER_FLAGS) as processes,
        AsyncClient(processes.address) as client,
    ):
        cases = await _answered(client, [*_cases(options)])
        pulse, rng = Pulse(), random.Random(options.seed)
        crew = Crew(processes, pulse, rng, options.kinds.split(","))
        clients = Clients(client.stub, pulse, crew)
        load = Load(clients.send, _endless(rng, cases), options.concurrency)
        faults = iter(progress(range(options.faults), "faults of workers"))
        restarts = iter(progress(range(options.restarts), "faults of the coordinator"))
        pause = PAUSE_SECONDS * max(1.0, options.faults / max(1, options.restarts))
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(load.run())
            async with asyncio.TaskGroup() as disturbing:
                for role in ROLES:
                    disturbing.create_task(_disturb(crew, role, faults, rng, PAUSE_SECONDS))
                disturbing.create_task(_disturb(crew, "coordinator", restarts, rng, pause))
            load.stop()
    tally = load.tally
    return {
        "faults": len(crew.recoveries),
        "answers": tally.outcomes["answered"],
        "tokens": tally.tokens,
        "sent_again": clients.sent_again,
        "died": dict(+crew.died),
        "recovery": crew.table(),
        "problems": [*tally.faults, *crew.faults],
    }


class Clients:
    """Clients that send a request again if the coordinator was killed before it was answered."""

    def __init__(self, stub: Any, pulse: Pulse, crew: Crew) -> None:
        self.sent_again = 0
        self._stub, self._pulse, self._crew = stub, pulse, crew

    async def send(self, case: Case) -> Tokens:
        """The tokens of a request. AioRpcError if it fails although the coordinator lives."""
        while True:
            await self._crew.coordinator_serves()
            restarts = self._crew.restarts
            try:
                return await ask(self._stub, case, self._pulse)
            except grpc.aio.AioRpcError as error:
                if self._crew.restarts == restarts or error.code() is not grpc.StatusCode.UNAVAILABLE:
                    raise
                self.sent_again += 1


async def _disturb(crew: Crew, role: str, faults: Iterator[int], rng: random.Random, pause: float) -> None:
    for _ in faults:
        await asyncio.sleep(rng.uniform(0, pause))
        await crew.happen(role)


def _cases(options: argparse.Namespace) -> Iterator[Case]:
    prompts = own_prompts()
    for number in range(options.requests):
        params = VARIANTS[number % len(VARIANTS)]
        request = make_request(prompts[number % len(prompts)].prompt, max_tokens=options.max_tokens, **params)
        yield Case(request, is_stream=number % 5 > 0)


async def _answered(client: AsyncClient, cases: list[Case]) -> list[Case]:
    """The cases with the tokens that plain decoding gives them."""
    plain = []
    for number, case in enumerate(cases):
        request = pb.GenerateRequest()
        request.CopyFrom(case.request)
        request.speculative.num_speculative_tokens = 0
        request.request_id = f"plain-{number}"
        plain.append(Case(request))
    expected = await asyncio.gather(*(ask(client.stub, case, Pulse()) for case in plain))
    return [replace(case, expected=tokens) for case, tokens in zip(cases, expected, strict=True)]


def _endless(rng: random.Random, cases: list[Case]) -> Iterator[Case]:
    """Cases in random order, with ids and draft lengths of their own."""
    for number in count():
        case, request = rng.choice(cases), pb.GenerateRequest()
        request.CopyFrom(case.request)
        request.request_id = f"chaos-{number}"
        if (k := rng.choice(DRAFT_LENGTHS)) is not None:
            request.speculative.num_speculative_tokens = k
        yield replace(case, request=request)


if __name__ == "__main__":
    main()
