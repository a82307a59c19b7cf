"""A coordinator with fake workers, each a process of its own on loopback sockets.

python -m benchmarks.cost.fakes [--max-model-len N] [--pass-ms MS] [--row-ms MS]

serves both fakes and prints their addresses.
"""

import argparse
import asyncio
import contextlib
import json
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import IO, Any

import grpc

from benchmarks.report import parser_of, whole
from benchmarks.runs import current_info
from specpool.client import AsyncClient
from specpool.testing import FakeDraft, FakeTarget
from specpool.v1 import generation_pb2 as pb

SLOTS = 64
READY_SECONDS = 60


def load_options(part: str, description: str | None, tokens: int, arguments: Sequence[str]) -> argparse.Namespace:
    """Options of a part with fake workers; `tokens`: default length of an answer."""
    parser = parser_of(description, prog=f"python -m benchmarks.cost --of {part}")
    parser.add_argument("--sequences", type=whole(1, 256), default=8, help="answers generated at once")
    parser.add_argument("--tokens", type=whole(1, 4000), default=tokens, help="tokens of each answer")
    parser.add_argument("--k", type=whole(0, 16), default=4, help="draft tokens per round")
    parser.add_argument("--repeats", type=whole(1, 1000), default=5)
    return parser.parse_args(arguments)


def start_process(stack: ExitStack, *arguments: str, stderr: IO[str] | None = None) -> subprocess.Popen[str]:
    """A Python process that ends with the stack. `stderr`: file for its log."""
    command = [sys.executable, *arguments]
    process = stack.enter_context(subprocess.Popen(command, stdout=subprocess.PIPE, stderr=stderr, text=True))
    stack.callback(process.kill)
    return process


def first_line(stack: ExitStack, *arguments: str) -> Any:
    process = start_process(stack, *arguments)
    assert process.stdout is not None
    return json.loads(process.stdout.readline())


def start_fakes(stack: ExitStack, *flags: str) -> tuple[str, str]:
    target, draft = first_line(stack, "-m", "benchmarks.cost.fakes", *flags)
    return target, draft


def start_coordinator(
    stack: ExitStack, port: int, target: str, draft: str | None, *flags: str
) -> "subprocess.Popen[str]":
    addresses = ["--target-address", target, *(["--draft-address", draft] if draft else [])]
    return start_process(
        stack, "-m", "coordinator.server", *addresses, "--port", str(port), "--log-level", "error", *flags
    )


async def wait_ready(client: AsyncClient, draft: bool = True) -> None:
    for _ in range(10 * READY_SECONDS):
        with contextlib.suppress(grpc.aio.AioRpcError):  # it is still starting
            info = await client.server_info()
            if info.target.state == "ready" and (info.draft.state == "ready" or not draft):
                return
        await asyncio.sleep(0.1)
    raise SystemExit("the coordinator did not get ready")


async def run_once(client: AsyncClient, options: argparse.Namespace) -> dict[str, float]:
    """Generate all answers at once. Return the number of rounds, and their milliseconds of wire and scheduling."""
    before = (await current_info(client)).counters
    requests = [
        pb.GenerateRequest(
            text=f"prompt {i}",
            sampling_params=pb.SamplingParams(max_tokens=options.tokens, ignore_eos=True),
            speculative=pb.SpeculativeParams(num_speculative_tokens=options.k),
        )
        for i in range(options.sequences)
    ]
    await asyncio.gather(*(client.stub.Generate(request) for request in requests))
    after = (await current_info(client)).counters
    rounds = after.rounds - before.rounds
    own = {
        f"{stage}_ms": 1000 * (after.stage_seconds[stage] - before.stage_seconds[stage]) / rounds
        for stage in ("wire", "schedule")
    }
    return {"rounds": rounds, "round_ms": sum(own.values()), **own}


def cpu_seconds(pid: int) -> float:
    """Processor time of a process's running threads."""
    return sum(int(path.read_text().split()[0]) for path in Path(f"/proc/{pid}/task").glob("*/schedstat")) / 1e9


async def serve(options: argparse.Namespace) -> None:
    """Serve both fakes until killed, and print their addresses."""
    pass_seconds = (lambda rows: (options.pass_ms + options.row_ms * rows) / 1000) if options.pass_ms else None
    target = FakeTarget(slots=SLOTS, max_model_len=options.max_model_len, pass_seconds=pass_seconds)
    draft = FakeDraft(target, slots=SLOTS)
    print(json.dumps([await target.start(), await draft.start()]), flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    _parser = parser_of(__doc__)
    _parser.add_argument("--max-model-len", type=int, default=4096)
    _parser.add_argument("--pass-ms", type=float, default=0.0)
    _parser.add_argument("--row-ms", type=float, default=0.0, help="added to --pass-ms for each row")
    asyncio.run(serve(_parser.parse_args()))
