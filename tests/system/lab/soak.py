"""Soak test: real processes under random requests, cancellations, deadlines, cuts and faults, with an audit at the end.

    make soak SOAK="--requests 20000 --workers 2 --faults 100"
    make soak SOAK="--cuts 3000"
    make soak SOAK="--queued 10000"

The models are a tiny random pair. The audit compares a share of the answers with plain decoding, looks for leftover
slots and requests, and checks that no process has grown since the first quarter of the run. `--queued` sends a number
of requests at once: the audit then bounds the coordinator's memory per request, and urgent requests must overtake the
queue. `--cuts` sets how often the links to the workers are cut; `--faults`, how often one of several target or draft
workers is killed, stopped or leaves. Exit status 1: the audit found a fault. The last line printed is JSON.
"""

import argparse
import asyncio
import random
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lab.crew import Crew
from lab.load import Load, Pulse, equals_plain_decoding, random_case, sender
from lab.processes import ROLES, Life, Processes, memory, running

from benchmarks.pair import make_tiny_pair
from benchmarks.report import console, finish, output_folder, progress, show, whole
from specpool.cli.processes import ProcessFailedError
from specpool.client import AsyncClient
from specpool.v1 import generation_pb2 as pb

SAMPLE_SECONDS, CUT_SECONDS, PAUSE_SECONDS = 0.25, 0.01, 0.25
WARM_UP = 0.25
"""Share of the run after which memory must stop growing."""
AUDIT_SHARE = 0.05
URGENT_PRIORITY = -1
URGENT_SHARE = 0.25
"""Maximum share of the run that an urgent request may take."""
AUDIT_SECONDS, IDLE_SECONDS = 5.0, 20.0
"""Time for the coordinator to audit answers that found no room before, and then to become idle."""
COUNT = whole(1, 10**9)


def main(arguments: Sequence[str] | None = None) -> None:
    """Parse the command line, run the soak, and print the audit."""
    options = parse(arguments)
    try:
        with tempfile.TemporaryDirectory() as folder:
            result = asyncio.run(soak(options, *make_tiny_pair(Path(folder))))
    except ProcessFailedError as error:
        raise SystemExit(str(error)) from None
    show("resident memory, MiB", [{"process": name, **row} for name, row in result["resident_mib"].items()])
    show("soak", [{"measure": name, "value": value} for name, value in result.items() if name != "resident_mib"])
    finish("soak", result, options.output)
    if result["faults"]:
        raise SystemExit(f"the audit found {len(result['faults'])} faults")


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Options of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=COUNT, default=20_000)
    parser.add_argument("--concurrency", type=COUNT, default=64, help="requests in flight")
    parser.add_argument("--queued", type=COUNT, help="requests sent at once, instead of a constant load")
    parser.add_argument("--cuts", type=COUNT, default=0, help="number of times to cut the links to the workers")
    parser.add_argument("--workers", type=COUNT, default=1, help="target workers, and draft workers")
    parser.add_argument("--faults", type=COUNT, default=0, help="number of faults of workers")
    parser.add_argument("--max-num-seqs", type=COUNT, default=16)
    parser.add_argument("--checked", type=float, default=0.05, help="share of answers compared with plain decoding")
    parser.add_argument("--growth-mib", type=float, default=48.0, help="memory growth allowed for a process")
    parser.add_argument("--queued-kib", type=float, default=64.0, help="memory allowed for a queued request")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--coordinator-flags", default="", help="further flags of the coordinator, in one argument")
    parser.add_argument("--output", type=output_folder, help="folder for the result")
    options = parser.parse_args(arguments)
    if not 0 <= options.checked <= 1:
        parser.error(f"--checked: {options.checked:g} is not from 0 to 1")
    if options.faults and options.workers == 1:
        parser.error("--faults: needs --workers 2 or more")
    if options.cuts and options.workers > 1:
        parser.error("--cuts: needs --workers 1")
    if options.queued:
        options.requests = options.concurrency = options.queued
    return options


async def soak(options: argparse.Namespace, target: Path, draft: Path) -> dict[str, Any]:
    """Run the load and audit the service."""
    flags = ["--max-num-seqs", str(options.max_num_seqs), "--max-batch-size", str(options.max_num_seqs)]
    flags += ["--queue-size", str(max(256, 4 * options.concurrency)), "--audit-share", str(AUDIT_SHARE)]
    flags += options.coordinator_flags.split()
    workers = options.workers, options.workers
    console.print("starting the service")
    async with (
        running(target, draft, 2 * options.max_num_seqs, flags, bool(options.cuts), workers) as processes,
        AsyncClient(processes.address) as client,
    ):
        run = Soak(options, processes, client)
        await run.play()
        await run.audit()
        return run.result()


class Soak:
    """One soak of a service."""

    def __init__(self, options: argparse.Namespace, processes: Processes, client: AsyncClient) -> None:
        self._options, self._processes, self._client = options, processes, client
        rng = random.Random(options.seed)
        cases = [random_case(rng, number) for number in range(options.requests)]
        kept = {case.request.request_id for case in cases if rng.random() < options.checked}
        pulse = Pulse()
        self._crew = Crew(processes, pulse, rng, ["kill", "short stop", "leave"])
        self._load = Load(
            sender(client.stub, pulse), progress(cases, "requests"), options.concurrency,
            keep=lambda case: case.request.request_id in kept,
        )  # fmt: skip
        self._resident: list[dict[Life, float]] = []
        self._urgent_seconds: list[float] = []
        self._max_queued, self._seconds = 0, 0.0
        self._counters = pb.ServerCounters()

    async def play(self) -> None:
        """Send all requests while watching memory and cutting links."""
        watchers = [self._watch_memory]
        watchers += [self._cut] * bool(self._options.cuts)
        watchers += [self._watch_queue, self._overtake] * bool(self._options.queued)
        watching = [asyncio.create_task(watch()) for watch in watchers]
        disturbing = [asyncio.create_task(self._disturb(role)) for role in ROLES]
        began = time.perf_counter()
        await self._load.run()
        self._seconds = time.perf_counter() - began
        await asyncio.gather(*disturbing)
        for task in watching:
            task.cancel()
        ended = await asyncio.gather(*watching, return_exceptions=True)
        failed = [f"a watcher failed: {error}" for error in ended if isinstance(error, Exception)]
        self._load.tally.faults.extend(failed)

    async def _watch_memory(self) -> None:
        while True:
            resident = self._processes.resident_mib()
            self._resident.append({life: mib for life, mib in resident.items() if life[0] not in self._crew.disturbed})
            await asyncio.sleep(SAMPLE_SECONDS)

    async def _cut(self) -> None:
        rng, made = random.Random(self._options.seed), 0
        while True:
            if made < self._options.cuts * self._done:
                rng.choice(self._processes.proxies).cut()
                made += 1
            await asyncio.sleep(CUT_SECONDS)

    async def _disturb(self, role: str) -> None:
        """Let faults happen to a role until the load ends, and wait until the last one is over."""
        while self._done < 1:
            if len(self._crew.recoveries) < self._options.faults * self._done:
                await self._crew.happen(role)
            await asyncio.sleep(CUT_SECONDS)

    @property
    def _done(self) -> float:
        """Share of the requests that have ended."""
        return self._load.tally.outcomes.total() / float(self._options.requests)

    async def _watch_queue(self) -> None:
        while True:
            self._max_queued = max(self._max_queued, (await self._client.server_info()).queued)
            await asyncio.sleep(SAMPLE_SECONDS)

    async def _overtake(self) -> None:
        """Send urgent requests past the queue, one after another."""
        request = pb.GenerateRequest(
            tokenized=pb.TokenizedInput(input_ids=[1, 2, 3]),
            sampling_params=pb.SamplingParams(max_tokens=1),
            priority=URGENT_PRIORITY,
        )
        while True:
            began = time.perf_counter()
            await self._client.stub.Generate(request)
            self._urgent_seconds.append(time.perf_counter() - began)
            await asyncio.sleep(PAUSE_SECONDS)

    async def audit(self) -> None:
        """Looks for leftover slots and requests, wrong tokens and growing memory."""
        await asyncio.sleep(AUDIT_SECONDS)
        tally, info = self._load.tally, await self._idle()
        self._counters = info.counters
        tally.faults += [f"the {name} has ended" for name in self._processes.ended()] + self._crew.faults
        repeated = {name: times for name, times in tally.answered_ids.items() if times > 1}
        tally.faults += [f"{name} was answered {times} times" for name, times in repeated.items()]
        leftovers = {
            "running": info.running,
            "queued": info.queued,
            "slots": _slots_in_use(info),
            "failed samples": info.counters.finished["error"],
            "audits with other tokens": info.counters.audited["different"],
        }
        tally.faults += [f"{number} {name} left over" for name, number in leftovers.items() if number]
        finished = info.counters.finished["stop"] + info.counters.finished["length"]
        if finished < tally.samples:
            tally.faults.append(f"{tally.samples} samples were answered, but {finished} counted")
        for request, tokens in tally.kept:
            if not await equals_plain_decoding(self._client.stub, request, tokens):
                tally.faults.append(f"{request.request_id}: the tokens differ from plain decoding")
        for name, row in self._memory.items():
            queued = (self._options.queued or 0) * (name == "coordinator")
            if row["growth"] > self._options.growth_mib + queued * self._options.queued_kib / 1024:
                tally.faults.append(f"the {name} grew by {row['growth']} MiB")
        if self._options.queued and self._max_urgent > URGENT_SHARE * self._seconds:
            tally.faults.append("urgent requests waited behind the queue")

    async def _idle(self) -> pb.GetServerInfoResponse:
        """The server's state once it is idle, or after IDLE_SECONDS."""
        ends = time.perf_counter() + IDLE_SECONDS
        while True:
            info = await self._client.server_info()
            is_known = all(worker.HasField("load") for worker in (*info.targets, *info.draft_workers))
            if (is_known and not info.running + info.queued + _slots_in_use(info)) or time.perf_counter() > ends:
                return info
            await asyncio.sleep(PAUSE_SECONDS)

    @property
    def _max_urgent(self) -> float:
        return max(self._urgent_seconds, default=self._seconds)

    @property
    def _memory(self) -> dict[str, dict[str, float]]:
        # A queue fills at once, so all growth counts.
        return memory(self._resident, WARM_UP, from_first=bool(self._options.queued))

    def result(self) -> dict[str, Any]:
        """All figures."""
        tally, proxies = self._load.tally, self._processes.proxies
        return {
            "requests": self._options.requests,
            "concurrency": self._options.concurrency,
            "seconds": round(self._seconds, 1),
            "tokens_per_s": round(tally.tokens / self._seconds, 1),
            "outcomes": dict(tally.outcomes),
            "compared": len(tally.kept),
            "faults_of_workers": len(self._crew.recoveries),
            "audited": dict(self._counters.audited),
            "cuts": sum(proxy.cuts for proxy in proxies),
            "connections_cut": sum(proxy.connections_cut for proxy in proxies),
            "max_queued": self._max_queued,
            "max_urgent_s": round(self._max_urgent, 3) if self._options.queued else None,
            "rounds": self._counters.rounds,
            "cache_misses": self._counters.cache_misses,
            "finished": dict(self._counters.finished),
            "resident_mib": self._memory,
            "faults": tally.faults,
        }


def _slots_in_use(info: pb.GetServerInfoResponse) -> int:
    return sum(worker.load.slots_in_use for worker in (*info.targets, *info.draft_workers))


if __name__ == "__main__":
    main()
