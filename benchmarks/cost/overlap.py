"""Compare overlapping groups and drafting ahead with alternating workers. Fakes have the assumed speed of two GPUs.

The coordinator and the wire are real. The flags give the milliseconds of a pass for the first row and for each further
row. Every answer must equal plain decoding.
"""

import argparse
import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Any

from benchmarks.cost.fakes import wait_ready
from benchmarks.report import finish, output_folder, parser_of, progress, show, whole
from coordinator.config.settings import CoordinatorSettings, Overlap
from coordinator.server import CoordinatorServer
from specpool.client import AsyncClient
from specpool.drafting.plans import DraftMethod
from specpool.testing import FakeDraft, FakeTarget

CONCURRENCIES = (1, 2, 4, 8, 16, 32)
KINDS: dict[str, tuple[Overlap, int | None]] = {
    "plain": ("off", 0),
    "in turn": ("off", None),
    "overlapped": ("on", None),
}
PROMPT_LENGTH = 16


def main(arguments: Sequence[str]) -> None:
    """Parse the command line and run the benchmark."""
    parser = parser_of(__doc__, prog="python -m benchmarks.cost --of overlap")
    parser.add_argument("--verify-ms", type=float, nargs=2, default=(8.0, 0.05), metavar=("FIRST", "MORE"))
    parser.add_argument("--draft-ms", type=float, nargs=2, default=(2.0, 0.02), metavar=("FIRST", "MORE"))
    parser.add_argument("--acceptance", type=float, default=0.8)
    parser.add_argument("--tokens", type=whole(1, 4000), default=200, help="tokens of each answer")
    parser.add_argument("--output", type=output_folder, help="folder for the result")
    options = parser.parse_args(arguments)
    rows = [asyncio.run(measure(concurrency, options)) for concurrency in progress(CONCURRENCIES, "concurrencies")]
    show("tokens/s", rows)
    finish("overlap", {**vars(options), "output": None, "rows": rows}, options.output)


async def measure(concurrency: int, options: argparse.Namespace) -> dict[str, Any]:
    """Tokens per second of every kind, and the gain of overlapping."""
    speeds = {name: await speed(concurrency, *kind, options) for name, kind in KINDS.items()}
    gain = {"of_turns": round(speeds["overlapped"] / speeds["in turn"], 2)}
    return {"concurrency": concurrency, **{name: round(found, 1) for name, found in speeds.items()}, **gain}


async def speed(concurrency: int, overlap: Overlap, k: int | None, options: argparse.Namespace) -> float:
    """Tokens per second of `concurrency` requests at once, after a warm-up."""
    target = FakeTarget(slots=max(CONCURRENCIES), pass_seconds=pass_seconds(*options.verify_ms))
    draft = FakeDraft(target, options.acceptance, slots=target.slots, pass_seconds=pass_seconds(*options.draft_ms))
    settings = CoordinatorSettings(
        port=0, target_address=await target.start(), draft_address=await draft.start(), max_num_seqs=concurrency,
        max_batch_size=concurrency, overlap=overlap, draft_method=DraftMethod.MODEL, drain_seconds=1, log_level="error",
    )  # fmt: skip
    process = CoordinatorServer(settings)
    async with AsyncClient(f"127.0.0.1:{await process.start()}", retry_seconds=5) as client:
        await wait_ready(client)
        for _ in range(2):
            began = time.perf_counter()
            await asyncio.gather(*(answer(client, target, i, k, options.tokens) for i in range(concurrency)))
            seconds = time.perf_counter() - began
    process.server.stop()
    await process.wait_stopped()
    await asyncio.gather(target.stop(), draft.stop())
    return float(concurrency * options.tokens / seconds)


async def answer(client: AsyncClient, target: FakeTarget, number: int, k: int | None, tokens: int) -> None:
    """Send one request and check its tokens."""
    prompt = [number] * PROMPT_LENGTH
    response = await client.generate(prompt, max_tokens=tokens, num_speculative_tokens=k, ignore_eos=True)
    if list(response.token_ids) != target.continuation(prompt, tokens):
        raise SystemExit("the tokens differ from plain decoding")


def pass_seconds(first: float, more: float) -> Callable[[int], float]:
    """Seconds of a pass by its rows, from milliseconds of the first row and of each further row."""
    return lambda rows: (first + more * (rows - 1)) / 1000
