"""Measure the service under a sustained load of long answers, or the time to first token with a shared prefix.

    python -m benchmarks.sustained [--clients 1,8,16] [--seconds 120] [--plain] [--llamacpp] [--prompts FILE]
    python -m benchmarks.sustained --prefix [--repeats 3]

Each client streams answers of 350 to 700 tokens, one after another. All prompts differ, but every second client's begin
with the same 300 tokens. "default" is the service with speculation, "plain" the service without, and llama.cpp's server
has one slot per client (see `benchmarks.llamacpp` for its installation). Only one of them computes at a time. Figures
exclude the first five seconds. A gap is the time between two messages of an answer. The coordinator's counters give the
share of all stages' time spent on realignment, and the share of prompt tokens that were cached.

With `--prefix`, eight prompts that begin with the same 1,000 tokens run one after another; each repeat has its own
tokens. The table shows the median time to first token of the first prompt and of the others, and the others' maximum.
The last line printed is JSON.
"""

import argparse
import asyncio
import statistics
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from itertools import cycle, islice
from pathlib import Path
from random import Random
from typing import Any

from benchmarks.llamacpp import LLAMACPP, SERVICE, TokenIds
from benchmarks.llamacpp_process import Engine, completion, environment, only_gguf, running_llamacpp
from benchmarks.prompts import add_prompts, checked, in_turn, load_by_category, token_ids
from benchmarks.report import console, finish, output_folder, parser_of, percentile, progress, show, whole, wholes
from benchmarks.runs import current_info
from specpool.cli.processes import ProcessFailedError
from specpool.cli.up import running
from specpool.cli.up_settings import UpSettings
from specpool.client import AsyncClient
from specpool.client.prompts import PromptLine
from specpool.client.requests import GenerateOptions
from specpool.engine.models.embedded_pair import embedded_pair
from specpool.v1 import generation_pb2 as pb

LENGTHS, SHARED_TOKENS = (350, 700), 300
WARM_UP_SECONDS = 5
PREFIX_PROMPTS, PREFIX_TOKENS, PREFIX_ANSWER = 8, 1000, 8
MAX_PROMPT_TOKENS = 1024
RUN_NUMBERS = 10**6

Stream = Callable[[list[int], int], AsyncIterator[int]]
"""Streams an answer to a prompt, of a given length. Yields the number of tokens in each message."""
Row = dict[str, Any]
NO_SHARES: Row = {"realign_%": None, "cached_%": None}


@dataclass
class Meter:
    """Counts the tokens and gaps of all streams, in seconds of one clock."""

    opens: float
    tokens: int = 0
    gaps: list[float] = field(default_factory=list)

    def record(self, now: float, last: float | None, tokens: int) -> None:
        """Count a message unless it came before `opens`. `last`: time of the answer's previous message."""
        if now >= self.opens:
            self.tokens += tokens
        if last is not None and last >= self.opens:
            self.gaps.append(now - last)


def main() -> None:
    options = parse()
    try:
        rows = asyncio.run(serve(options))
    except (OSError, RuntimeError, ProcessFailedError) as error:
        raise SystemExit(f"sustained: {error}") from None
    show("a shared prefix" if options.prefix else f"{options.seconds} seconds of long answers", rows)
    settings = {"seconds": options.seconds, "lengths": LENGTHS, "shared_tokens": SHARED_TOKENS}
    finish("sustained_prefix" if options.prefix else "sustained", {**settings, "rows": rows}, options.output)


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line and load the prompts."""
    parser = parser_of(__doc__)
    parser.add_argument("--clients", type=wholes(1, 256), default="1,8,16", help="requests in flight")
    parser.add_argument("--seconds", type=whole(WARM_UP_SECONDS + 1, 10**5), default=120, help="length of a run")
    parser.add_argument("--plain", action="store_true", help="also run without speculation")
    parser.add_argument("--llamacpp", action="store_true", help="also run llama.cpp's server")
    parser.add_argument("--prefix", action="store_true", help="measure a shared prefix instead")
    parser.add_argument("--repeats", type=whole(1, 1000), default=3, help="runs of --prefix")
    add_prompts(parser)
    parser.add_argument("--output", type=output_folder, help="folder for the result")
    options = parser.parse_args(arguments)
    options.lines = in_turn(checked(parser, lambda: load_by_category(options.prompts)).values())
    return options


async def serve(options: argparse.Namespace) -> list[Row]:
    pair = embedded_pair()
    settings = UpSettings(port=0, log_level="error", drain_seconds=1, max_num_seqs=max(options.clients))
    engine = None
    if options.llamacpp:
        engine = Engine(environment()[0], only_gguf(pair.target), settings.threads)
    console.print("starting the service")
    async with running(settings) as address, AsyncClient(address) as client:
        if options.prefix:
            return await measure_prefix(client, pair.target, options)
        return await measure(client, pair.target, engine, options)


async def measure(client: AsyncClient, model: Path, engine: Engine | None, options: argparse.Namespace) -> list[Row]:
    rows: list[Row] = []
    for clients in options.clients:
        async with AsyncExitStack() as stack:
            streams = {"default": stream_of_service(client, SERVICE["default"])}
            if options.plain:
                streams["plain"] = stream_of_service(client, SERVICE["plain"])
            if engine is not None:
                context = MAX_PROMPT_TOKENS + LENGTHS[1]
                address = await stack.enter_async_context(running_llamacpp(engine, clients, context))
                streams[LLAMACPP] = stream_of_llamacpp(address)
            for kind, stream in progress(list(streams.items()), f"{clients} clients"):
                prompts = prompts_of(model, options.lines, clients, options.seconds, first=1 + len(rows) * RUN_NUMBERS)
                measured = await load(client if kind in SERVICE else None, stream, prompts, options.seconds)
                rows.append({"clients": clients, "decoding": kind, **measured})
    return rows


def prompts_of(model: Path, lines: list[PromptLine], clients: int, seconds: int, first: int) -> list[TokenIds]:
    """Return each client's prompts, one per second. `first`: number of the first prompt, so that none is cached."""
    shared, numbered = prefix(model, SHARED_TOKENS, first), numbered_lines(lines, first)
    room = MAX_PROMPT_TOKENS - SHARED_TOKENS
    every = [ids[:room] for ids in token_ids(model, list(islice(numbered, clients * seconds)))]
    return [[(shared if client % 2 else []) + ids for ids in every[client::clients]] for client in range(clients)]


def numbered_lines(lines: Sequence[PromptLine], first: int = 1) -> Iterator[PromptLine]:
    """Repeat the prompts endlessly, each with a new number before its last text."""
    for number, line in enumerate(cycle(lines), first):
        if isinstance(line.prompt, str):
            yield replace(line, prompt=f"{number}. {line.prompt}")
        else:
            *before, last = (dict(message) for message in line.prompt)
            yield replace(line, prompt=[*before, {**last, "content": f"{number}. {last['content']}"}])


def prefix(model: Path, count: int, first: int = 1) -> list[int]:
    """Return the first `count` tokens of a numbered text. `first`: its first number."""
    rules = " ".join(f"Rule {n}: never use more than {n} words for an answer." for n in range(first, first + count))
    return token_ids(model, [PromptLine(0, rules)])[0][:count]


def stream_of_service(client: AsyncClient, kind: GenerateOptions) -> Stream:
    async def stream(prompt: list[int], tokens: int) -> AsyncIterator[int]:
        options: GenerateOptions = {"max_tokens": tokens, "ignore_eos": True, "temperature": 0.0, **kind}
        async for message in client.stream(prompt, **options):
            if message.chunk.token_ids:
                yield len(message.chunk.token_ids)

    return stream


def stream_of_llamacpp(address: str) -> Stream:
    async def stream(prompt: list[int], tokens: int) -> AsyncIterator[int]:
        async for message in completion(address, prompt, tokens, stream=True, cache_prompt=True):
            if message:
                yield len(message)

    return stream


async def load(service: AsyncClient | None, stream: Stream, prompts: list[TokenIds], seconds: int) -> Row:
    """Run one client per list of prompts and return the figures. Raises the first error of a client.

    `service`: its counters give the shares. None: the row has no shares.
    """
    began, counters = time.perf_counter(), []
    meter = Meter(began + WARM_UP_SECONDS)
    tasks = [asyncio.create_task(run_client(stream, some, Random(i), meter)) for i, some in enumerate(prompts)]
    try:
        for ends in (meter.opens, began + seconds):
            done, _ = await asyncio.wait(tasks, timeout=ends - time.perf_counter(), return_when=asyncio.FIRST_EXCEPTION)
            for task in done:
                task.result()
            if service is not None:
                counters.append((await current_info(service)).counters)
        elapsed = time.perf_counter() - meter.opens
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return figures(meter, elapsed) | (shares(*counters) if counters else NO_SHARES)


async def run_client(stream: Stream, prompts: TokenIds, random: Random, meter: Meter) -> None:
    """Stream answers until cancelled."""
    for prompt in cycle(prompts):
        last = None
        try:
            async for tokens in stream(prompt, random.randint(*LENGTHS)):
                now = time.perf_counter()
                meter.record(now, last, tokens)
                last = now
        except asyncio.CancelledError:
            meter.record(time.perf_counter(), last, 0)  # count the gap of a stalled stream
            raise


def figures(meter: Meter, seconds: float) -> Row:
    p50, p99, longest = (1000 * (percentile(meter.gaps, share) or 0.0) for share in (0.5, 0.99, 1.0))
    return {
        "tokens_per_s": round(meter.tokens / seconds, 1),
        "gap_p50_ms": round(p50, 1),
        "gap_p99_ms": round(p99, 1),
        "longest_gap_ms": round(longest, 1),
        "longest_of_p50": round(longest / p50, 1) if p50 else None,
    }


def shares(before: pb.ServerCounters, after: pb.ServerCounters) -> Row:
    """Return percentages: realignment of all stages' time, and cached tokens of all counted prompt tokens."""
    spent = {stage: after.stage_seconds[stage] - before.stage_seconds[stage] for stage in after.stage_seconds}
    prompt_tokens = after.prompt_tokens - before.prompt_tokens
    cached = after.cached_tokens - before.cached_tokens
    return {
        "realign_%": round(100 * spent["realign"] / sum(spent.values()), 3) if any(spent.values()) else None,
        "cached_%": round(100 * cached / prompt_tokens, 1) if prompt_tokens else None,
    }


async def measure_prefix(client: AsyncClient, model: Path, options: argparse.Namespace) -> list[Row]:
    lines = list(islice(numbered_lines(options.lines), PREFIX_PROMPTS))
    stream, times = stream_of_service(client, {}), []
    before = (await current_info(client)).counters
    for repeat in progress(range(options.repeats), "repeats"):
        shared = prefix(model, PREFIX_TOKENS, first=1 + repeat * PREFIX_TOKENS)
        times.append([await first_token_ms(stream, shared + ids) for ids in token_ids(model, lines)])
    cached = shares(before, (await current_info(client)).counters)["cached_%"]
    first, others = [first for first, *_ in times], [each for _, *others in times for each in others]
    summary = {"first_ms": statistics.median(first), "others_ms": statistics.median(others), "slowest_ms": max(others)}
    return [{**{name: round(value, 1) for name, value in summary.items()}, "cached_%": cached}]


async def first_token_ms(stream: Stream, prompt: list[int]) -> float:
    began, first = time.perf_counter(), None
    async for _ in stream(prompt, PREFIX_ANSWER):
        first = first or time.perf_counter()
    assert first is not None
    return 1000 * (first - began)


if __name__ == "__main__":
    main()
