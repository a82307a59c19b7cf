"""A soak: real processes under requests of all kinds, cancellations, deadlines and cuts, audited at the end.

    python -m benchmarks.soak [--requests 20000] [--concurrency 64] [--cuts 3000] [--output FOLDER]
    python -m benchmarks.soak --queued 10000

The pair is tiny and random. The audit compares a share of the answers with plain decoding of the same requests, counts
slots and requests that are left over, and compares each process's resident memory near the end with that after the
first quarter of the run. With `--queued`, that number of requests is sent at once: the audit bounds the coordinator's
memory by what each request may take, and urgent requests must overtake the queue. `--cuts` is the number of times that
the connections between coordinator and workers are cut. The exit status is 1 if the audit finds anything. The last line
printed is JSON.
"""

import argparse
import asyncio
import random
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.progress import Progress

from benchmarks.report import console, finish, output_folder, show
from benchmarks.soak_load import Case, Tally, compare, random_case, run_case
from benchmarks.tiny_pair import make_tiny_pair
from benchmarks.trio import Trio, memory, running_trio
from specpool.cli.processes import ProcessFailedError
from specpool.client import AsyncClient
from specpool.v1 import generation_pb2 as pb

SAMPLE_SECONDS, CUT_SECONDS, PAUSE_SECONDS = 0.25, 0.01, 0.25
WARM_UP = 0.25
"""Share of the run after which memory must no longer grow."""
URGENT = -1
URGENT_SHARE = 0.25
"""Share of the run that an urgent request may take at most."""
IDLE_SECONDS = 20.0


def main() -> None:
    """Parses the command line, soaks, prints what the audit found."""
    options = parse()
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
    parser.add_argument("--requests", type=_positive, default=20_000)
    parser.add_argument("--concurrency", type=_positive, default=64, help="requests in flight at a time")
    parser.add_argument("--queued", type=_positive, help="requests sent at once, instead of a constant load")
    parser.add_argument("--cuts", type=_positive, help="number of times that connections to the workers are cut")
    parser.add_argument("--max-num-seqs", type=_positive, default=16)
    parser.add_argument("--checked", type=float, default=0.05, help="share of answers compared with plain decoding")
    parser.add_argument("--growth-mib", type=float, default=48.0, help="memory growth of a process that is allowed")
    parser.add_argument("--queued-kib", type=float, default=64.0, help="memory that a queued request may take")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--coordinator-flags", default="", help="further flags of the coordinator, as one argument")
    parser.add_argument("--output", type=output_folder, help="folder for the result")
    options = parser.parse_args(arguments)
    if not 0 <= options.checked <= 1:
        parser.error(f"--checked: {options.checked:g} is not from 0 to 1")
    if options.queued:
        options.requests = options.concurrency = options.queued
    return options


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not an integer of at least 1")
    return int(text)


async def soak(options: argparse.Namespace, target: Path, draft: Path) -> dict[str, Any]:
    """Runs the load, and audits what is left."""
    flags = ["--max-num-seqs", str(options.max_num_seqs), "--max-batch-size", str(options.max_num_seqs)]
    flags += ["--queue-size", str(max(256, 4 * options.concurrency)), *options.coordinator_flags.split()]
    console.print("starting the service")
    async with (
        running_trio(target, draft, 2 * options.max_num_seqs, flags, bool(options.cuts)) as trio,
        AsyncClient(trio.address) as client,
    ):
        run = Run(options, trio, client)
        await run.play()
        await run.audit()
        return run.result()


class Run:
    """One soak of a service."""

    def __init__(self, options: argparse.Namespace, trio: Trio, client: AsyncClient) -> None:
        self._options, self._trio, self._client = options, trio, client
        self._tally = Tally()
        self._resident: list[dict[str, float]] = []
        self._urgent_seconds: list[float] = []
        self._most_queued, self._seconds = 0, 0.0
        self._counters = pb.ServerCounters()

    @property
    def _most_urgent(self) -> float:
        return max(self._urgent_seconds, default=self._seconds)

    async def play(self) -> None:
        """Sends all requests, while memory is watched and connections are cut."""
        chance, free = random.Random(self._options.seed), asyncio.Semaphore(self._options.concurrency)
        cases = [random_case(chance, number) for number in range(self._options.requests)]
        kept = {case.request.request_id for case in cases if chance.random() < self._options.checked}
        watchers = (self._watch, self._watch_queue, self._cut, self._overtake)
        beside = [asyncio.create_task(watch()) for watch in watchers]
        began = time.perf_counter()
        with Progress(console=console, transient=True) as progress:
            bar = progress.add_task("requests", total=len(cases))

            async def one(case: Case) -> None:
                try:
                    await run_case(self._client, case, self._tally, case.request.request_id in kept)
                finally:
                    free.release()
                    progress.advance(bar)

            async with asyncio.TaskGroup() as tasks:
                for case in cases:
                    await free.acquire()
                    tasks.create_task(one(case))
        self._seconds = time.perf_counter() - began
        for task in beside:
            task.cancel()
        ended = await asyncio.gather(*beside, return_exceptions=True)
        self._tally.faults += [f"a watcher failed: {error}" for error in ended if isinstance(error, Exception)]

    async def _watch(self) -> None:
        while True:
            self._resident.append(self._trio.resident_mib())
            await asyncio.sleep(SAMPLE_SECONDS)

    async def _cut(self) -> None:
        chance = random.Random(self._options.seed)
        made = 0
        while self._options.cuts:
            if made < self._options.cuts * self._tally.done / self._options.requests:
                chance.choice(self._trio.proxies).cut()
                made += 1
            await asyncio.sleep(CUT_SECONDS)

    async def _watch_queue(self) -> None:
        while self._options.queued:
            info = await self._client.server_info()
            self._most_queued = max(self._most_queued, info.queued)
            await asyncio.sleep(SAMPLE_SECONDS)

    async def _overtake(self) -> None:
        """Sends urgent requests past a long queue, one after the other."""
        request = pb.GenerateRequest(
            tokenized=pb.TokenizedInput(input_ids=[1, 2, 3]),
            sampling_params=pb.SamplingParams(max_tokens=1),
            priority=URGENT,
        )
        while self._options.queued:
            began = time.perf_counter()
            await self._client.stub.Generate(request)
            self._urgent_seconds.append(time.perf_counter() - began)
            await asyncio.sleep(PAUSE_SECONDS)

    async def audit(self) -> None:
        """Looks for what must not be there: slots in use, requests left over, wrong tokens, growing memory."""
        faults, tally = self._tally.faults, self._tally
        faults += [f"the {name} has ended" for name in self._trio.has_ended()]
        faults += [f"{name} was answered {times} times" for name, times in tally.answered_ids.items() if times != 1]
        info = await self._idle()
        self._counters = info.counters
        for name, left in (
            ("running", info.running),
            ("queued", info.queued),
            ("slots of the target", info.target.load.slots_in_use),
            ("slots of the draft", info.draft.load.slots_in_use),
            ("failed samples", info.counters.finished["error"]),
        ):
            if left:
                faults.append(f"{left} {name} left over")
        finished = info.counters.finished["stop"] + info.counters.finished["length"]
        if finished < tally.samples:
            faults.append(f"{tally.samples} samples were answered, and {finished} counted")
        for request, tokens in tally.kept:
            if not await compare(self._client, request, tokens):
                faults.append(f"{request.request_id}: its tokens are not those of plain decoding")
        faults += [
            f"the {name} grew by {row['growth']} MiB" for name, row in self._memory.items()
            if row["growth"] > self._allowed_mib(name)
        ]  # fmt: skip
        if self._options.queued and self._most_urgent > URGENT_SHARE * self._seconds:
            faults.append("urgent requests waited behind the queue")

    async def _idle(self) -> pb.GetServerInfoResponse:
        """The state of the server once nothing is left to do, or after some time that should have been enough."""
        ends = time.perf_counter() + IDLE_SECONDS
        while True:
            info = await self._client.server_info()
            taken = info.target.load.slots_in_use + info.draft.load.slots_in_use
            is_known = info.target.HasField("load") and info.draft.HasField("load")
            if (is_known and not info.running + info.queued + taken) or time.perf_counter() > ends:
                return info
            await asyncio.sleep(PAUSE_SECONDS)

    def _allowed_mib(self, name: str) -> float:
        queued: int = self._options.queued or 0
        allowed: float = self._options.growth_mib + (queued * self._options.queued_kib / 1024) * (name == "coordinator")
        return allowed

    @property
    def _memory(self) -> dict[str, dict[str, float]]:
        # A queue fills at once, so that all of the growth counts.
        return memory(self._resident, WARM_UP, to_the_most=bool(self._options.queued))

    def result(self) -> dict[str, Any]:
        """All figures."""
        tally = self._tally
        return {
            "requests": self._options.requests,
            "concurrency": self._options.concurrency,
            "seconds": round(self._seconds, 1),
            "tokens_per_s": round(tally.tokens / self._seconds, 1),
            "outcomes": dict(tally.outcomes),
            "compared": len(tally.kept),
            "cuts": sum(proxy.cuts for proxy in self._trio.proxies),
            "connections_cut": sum(proxy.connections_cut for proxy in self._trio.proxies),
            "most_queued": self._most_queued,
            "urgent_most_s": round(self._most_urgent, 3) if self._options.queued else None,
            "rounds": self._counters.rounds,
            "cache_misses": self._counters.cache_misses,
            "finished": dict(self._counters.finished),
            "resident_mib": self._memory,
            "faults": tally.faults,
        }


if __name__ == "__main__":
    main()
