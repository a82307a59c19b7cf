"""Measure the cost of realignment for every grouping policy and KV layout, beside plain decoding and `transformers`.

    python -m benchmarks.realign [--prompts FILE] [--batches 1 2 4 8 16] [--repeats 5] [--output FOLDER]

All answers are compared with one request at a time. The target has float32 activations, like `transformers`. Runs of
all kinds are interleaved; the tables show medians. For `exspec`, max_num_seqs is twice the batch size. Prefix caching
is off. The last line printed is JSON.
"""

import argparse
import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

from benchmarks.peers import Peers
from benchmarks.prompts import add_prompts, checked, load_prompts, number_of_prompts
from benchmarks.report import console, finish, median, output_folder, parser_of, progress, show, whole
from coordinator.config.settings import CoordinatorSettings
from coordinator.server import CoordinatorServer
from specpool.cli.processes import Service
from specpool.client import AsyncClient
from specpool.client.prompts import PromptLine
from specpool.engine.models.embedded_pair import embedded_pair
from specpool.rpc.ports import free_port
from specpool.v1 import generation_pb2 as pb

POLICIES, LAYOUTS = ("ragged", "exspec", "eqspec"), ("slots", "padded")
SPECULATIVE = [f"{policy}/{layout}" for policy in POLICIES for layout in LAYOUTS]
PLAIN, PEERS = "plain", ("generate", "generate_batch")
STAGES = ("draft", "verify", "realign", "wire", "schedule")
COLUMNS = ("hit_rate", "group_size", *(f"{stage}_share" for stage in STAGES), "realign_ms", "acceptance")
TokenIds = list[list[int]]
Run = dict[str, Any]


def main() -> None:
    parser, pair = parser_of(__doc__), embedded_pair()
    parser.add_argument("--target", default=str(pair.target))
    parser.add_argument("--draft", default=str(pair.draft))
    add_prompts(parser)
    parser.add_argument("--batches", type=whole(1, 256), nargs="+", default=[1, 2, 4, 8, 16])
    parser.add_argument("--max-tokens", type=whole(1, 4000), default=24)
    parser.add_argument("--k", type=whole(1, 16), default=4, help="draft tokens per round")
    parser.add_argument("--repeats", type=whole(1, 1000), default=5)
    every = [PLAIN, *SPECULATIVE, *PEERS]
    parser.add_argument("--kinds", nargs="+", choices=every, default=every, help="kinds of decoding; plain always runs")
    parser.add_argument("--output", type=output_folder, help="folder for the result")
    parser.add_argument("--name", default="realign", help="name of the file there")
    options = parser.parse_args()
    count = max(map(number_of_prompts, options.batches))
    options.lines = checked(parser, lambda: load_prompts(options.prompts, count))
    rows = asyncio.run(measure(options))
    for batch in options.batches:
        show(f"batch {batch}, k {options.k}", [cells(row) for row in rows if row["batch"] == batch])
    result = {"k": options.k, "max_tokens": options.max_tokens, "repeats": options.repeats, "rows": rows}
    finish(options.name, result, options.output)


async def measure(options: argparse.Namespace) -> list[Run]:
    peers = Peers(options.target) if set(PEERS) & set(options.kinds) else None
    kinds = list(dict.fromkeys([PLAIN, *options.kinds]))
    plan = [(kind, batch) for batch in options.batches for kind in kinds] * options.repeats
    runs: dict[tuple[str, int], list[Run]] = {}
    async with AsyncExitStack() as stack:
        addresses = {layout: await stack.enter_async_context(workers(layout, options)) for layout in LAYOUTS}
        truth, _ = await serve(addresses["slots"], "ragged", 1, 0, options.lines, options)
        for kind, batch in progress(plan, "runs"):
            some = options.lines[: number_of_prompts(batch)]
            if peers is not None and kind in PEERS:
                tokens, run = await asyncio.to_thread(peer_run, peers, kind, batch, some, options.max_tokens)
            else:
                policy, layout = ("ragged", "slots") if kind == PLAIN else kind.split("/")
                k = 0 if kind == PLAIN else options.k
                tokens, run = await serve(addresses[layout], policy, batch, k, some, options)
            run["tokens_per_s"] = sum(map(len, tokens)) / run["seconds"]
            run["exact_match"] = sum(one == other for one, other in zip(tokens, truth, strict=False)) / len(tokens)
            runs.setdefault((kind, batch), []).append(run)
    plain = {batch: median(runs[PLAIN, batch], "tokens_per_s") or 0.0 for batch in options.batches}
    return [summary(kind, batch, found, plain[batch]) for (kind, batch), found in runs.items()]


@asynccontextmanager
async def workers(layout: str, options: argparse.Namespace) -> AsyncIterator[tuple[str, str]]:
    """Run both workers with this layout. Yield the addresses of target and draft."""
    services = []
    for kind, model in (("target", options.target), ("draft", options.draft)):
        port = free_port()
        flags = ["--model", model, "--port", str(port), "--kv-layout", layout, "--log-level", "warning"]
        flags += ["--max-model-len", "2048", "--max-sequences", str(number_of_prompts(max(options.batches)))]
        if kind == "target":
            flags += ["--activations", "float32"]
        services.append(Service(f"{kind} worker", f"{kind}_worker.server", flags, f"127.0.0.1:{port}"))
    console.print(f"starting the workers, layout {layout}")
    try:
        for service in services:
            await service.start()
            await service.wait_serving()
        yield services[0].address, services[1].address
    finally:
        for service in services:
            await service.stop(drain_seconds=0)


async def serve(
    addresses: tuple[str, str], policy: str, batch: int, k: int, lines: list[PromptLine], options: argparse.Namespace
) -> tuple[TokenIds, Run]:
    """Token ids of the answers, and the coordinator's counters. All requests arrive at once."""
    target, draft = addresses
    process = CoordinatorServer(
        CoordinatorSettings(
            port=0, drain_seconds=0, target_address=target, draft_address=draft, policy=policy, max_batch_size=batch,
            max_num_seqs=2 * batch if policy == "exspec" else batch, num_speculative_tokens=k, queue_size=len(lines),
            prefix_caching=False,
        )
    )  # fmt: skip
    port = await process.start()
    await process.coordinator.target.wait_ready()
    if process.coordinator.lanes.first.draft is not None:
        await process.coordinator.lanes.first.draft.links[0].wait_ready()
    try:
        async with AsyncClient(f"127.0.0.1:{port}") as client:
            began = time.perf_counter()
            calls = [client.generate(line.prompt, max_tokens=options.max_tokens) for line in lines]
            answers = await asyncio.gather(*calls)
            seconds = time.perf_counter() - began
            info = await client.server_info()
    finally:
        process.server.stop()
        await process.wait_stopped()
    return [list(answer.token_ids) for answer in answers], {"seconds": seconds, **counted(info.counters)}


def counted(counters: pb.ServerCounters) -> Run:
    """The measures of a run, from the counters of a fresh coordinator."""
    grouping, stages = counters.grouping, counters.stage_seconds
    grouped = grouping.same_length_rounds + grouping.mixed_rounds
    grouped_sequences = sum(size * rounds for size, rounds in enumerate(grouping.group_sizes, 1))
    return {
        "acceptance": counters.accepted_draft_tokens / counters.draft_tokens if counters.draft_tokens else None,
        "hit_rate": grouping.same_length_rounds / grouped if grouped else None,
        "group_size": grouped_sequences / counters.rounds,
        **{f"{stage}_share": stages[stage] / sum(stages.values()) for stage in STAGES},
        "realign_ms": stages["realign"] * 1000 / counters.rounds,
    }


def peer_run(peers: Peers, kind: str, batch: int, lines: list[PromptLine], max_tokens: int) -> tuple[TokenIds, Run]:
    decode = peers.generate if kind == "generate" else peers.generate_batch
    began = time.perf_counter()
    tokens = decode([line.prompt for line in lines], batch, max_tokens)
    return tokens, {"seconds": time.perf_counter() - began}


def summary(kind: str, batch: int, runs: list[Run], plain: float) -> Run:
    """The row of a kind of decoding. `plain`: tokens/s of plain decoding at the same batch size."""
    speed = median(runs, "tokens_per_s") or 0.0
    row: Run = {"batch": batch, "decoding": kind, "tokens_per_s": round(speed, 1), "of_plain": round(speed / plain, 3)}
    for name in COLUMNS:
        value = median(runs, name)
        row[name] = None if value is None else round(value, 4)
    row["exact_match"] = min(run["exact_match"] for run in runs)
    return row


def cells(row: Run) -> Run:
    """The columns that fit a table, with shares of a round in percent."""
    shares = {
        f"{name.removesuffix('_share')} %": None if share is None else round(100 * share, 2)
        for name, share in row.items()
        if name.endswith("_share")
    }
    names = ("decoding", "tokens_per_s", "of_plain", "hit_rate", "group_size")
    return {**{name: row[name] for name in names}, **shares, "exact_match": row["exact_match"]}


if __name__ == "__main__":
    main()
