"""Adapt a draft to a narrow domain: record answers, train the embedded draft on them, and compare both drafts.

    python -m benchmarks.adaptation [--num-prompts 400] [--held-out 80] [--epochs 4] [--output FOLDER]

Prompts come from `benchmarks.domain`. A service with the embedded pair answers the held-out prompts, with a cache salt
so that it does not record them, and then records its answers to the other prompts. `specpool distill --from` trains the
draft on the recording. A service with the new draft answers the held-out prompts again. Both services also answer the
general prompts of `specpool demo`. The table compares both drafts, with four draft tokens per round from the model only
(k4), and with the server's defaults (best). Exit status 1: an answer has changed. The last line printed is JSON.
"""

import argparse
import asyncio
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

from benchmarks.domain import domain_prompts
from benchmarks.report import console, finish, output_folder, parser_of, real, show, whole
from specpool.cli.processes import ProcessFailedError
from specpool.cli.up import running
from specpool.cli.up_settings import UpSettings
from specpool.client import AsyncClient
from specpool.client.prompts import own_prompts
from specpool.client.requests import GenerateOptions, Prompt
from specpool.v1 import generation_pb2 as pb

KINDS: dict[str, GenerateOptions] = {"k4": {"num_speculative_tokens": 4, "draft_method": "model"}, "best": {}}
CONCURRENCY = 4
Row = dict[str, Any]


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument(
        "--num-prompts", type=whole(64, 10_000), default=400, help="number of prompts whose answers to record"
    )
    parser.add_argument("--held-out", type=whole(1, 10_000), default=80, help="number of further prompts to measure")
    parser.add_argument("--max-tokens", type=whole(8, 1000), default=96, help="maximum tokens of an answer")
    parser.add_argument("--epochs", type=real(0.01, 100), default=4.0, help="training passes over the answers")
    parser.add_argument(
        "--precision", choices=("float32", "bfloat16"), default="float32", help="precision of the training"
    )
    parser.add_argument("--output", type=output_folder, help="folder for the recording, the draft and the result")
    options = parser.parse_args()
    prompts = domain_prompts()
    if (needed := options.num_prompts + options.held_out) > len(prompts):
        parser.error(f"--num-prompts: {needed} prompts with --held-out, but there are {len(prompts)}")
    with tempfile.TemporaryDirectory() as scratch:
        folder = options.output or Path(scratch)
        try:
            result = adapt(prompts[: options.held_out], prompts[options.held_out : needed], folder, options)
        except ProcessFailedError as error:
            raise SystemExit(str(error)) from None
    show("acceptance by draft", result["rows"])
    finish("adaptation", result, options.output)
    if not result["exact_match"]:
        raise SystemExit("some answers have changed")


def adapt(held_out: list[str], recorded: list[str], folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Record answers, train a draft, and replace the old one. Return the measurements and the time of each step."""
    traffic, draft = folder / "traffic", folder / "draft"
    measured: dict[str, list[Prompt]] = {"domain": chats(held_out), "general": [each.prompt for each in own_prompts()]}
    began = time.perf_counter()
    before, answers = asyncio.run(serve(measured, chats(recorded), options.max_tokens, record=traffic))
    recorded_at = time.perf_counter()
    cpu_seconds = distill(traffic, draft, "--epochs", str(options.epochs), "--precision", options.precision)
    trained_at = time.perf_counter()
    after, answers_after = asyncio.run(serve(measured, [], options.max_tokens, draft=str(draft / "model")))
    return {
        "recorded_prompts": len(recorded),
        "held_out_prompts": len(held_out),
        "rows": [{"draft": name, **row} for name, rows in (("embedded", before), ("adapted", after)) for row in rows],
        "gained_points": round(100 * (after[0]["acceptance_rate"] - before[0]["acceptance_rate"]), 1),
        "exact_match": answers == answers_after,
        "record_s": round(recorded_at - began),
        "train_s": round(trained_at - recorded_at),
        "train_cpu_s": round(cpu_seconds),
    }


def chats(prompts: Iterable[str]) -> list[Prompt]:
    return [[{"role": "user", "content": prompt}] for prompt in prompts]


async def serve(
    measured: Mapping[str, list[Prompt]], recorded: list[Prompt], max_tokens: int, **settings: Any
) -> tuple[list[Row], list[list[int]]]:
    """Measure the draft on `measured`, then answer the prompts to record. Return the rows and the measured answers."""
    console.print(f"starting the service ({', '.join(settings)})")
    up = UpSettings(port=0, log_level="error", drain_seconds=5, max_num_seqs=CONCURRENCY, **settings)
    rows, answers = [], []
    async with running(up) as address, AsyncClient(address) as client:
        for (name, prompts), (kind, options) in product(measured.items(), KINDS.items()):
            # A unique salt keeps each answer out of the recording and out of the lookups of other requests.
            salted: list[GenerateOptions] = [
                options | {"max_tokens": max_tokens, "cache_salt": str(i)} for i in range(len(prompts))
            ]
            responses = await generate(client, prompts, salted)
            rows.append({"prompts": name, "kind": kind, **acceptance(responses)})
            answers += [list(response.token_ids) for response in responses]
        await generate(client, recorded, [{"max_tokens": max_tokens}] * len(recorded))
    return rows, answers


async def generate(
    client: AsyncClient, prompts: Sequence[Prompt], options: Sequence[GenerateOptions]
) -> list[pb.GenerateResponse]:
    places = asyncio.Semaphore(CONCURRENCY)

    async def answer(prompt: Prompt, options: GenerateOptions) -> pb.GenerateResponse:
        async with places:
            return await client.generate(prompt, **options)

    return await asyncio.gather(*map(answer, prompts, options))


def acceptance(responses: Sequence[pb.GenerateResponse]) -> Row:
    """Return the acceptance rate and the tokens per round over all answers."""
    speculation = [response.speculative_decoding for response in responses]
    tokens = sum(len(response.token_ids) for response in responses)
    drafted = sum(each.num_draft_tokens for each in speculation)
    accepted = sum(each.num_accepted_draft_tokens for each in speculation)
    return {
        "tokens": tokens,
        "acceptance_rate": round(accepted / max(1, drafted), 3),
        "tokens_per_round": round(tokens / (tokens - accepted), 2),
    }


def distill(traffic: Path, draft: Path, *options: str) -> float:
    """Train the embedded draft on the recording. Return the CPU time in seconds."""
    command = [sys.executable, "-m", "specpool.distill", "--from", str(traffic), "--output", str(draft)]
    before = _child_seconds()
    subprocess.run([*command, *options], check=True, stdout=sys.stderr)
    return _child_seconds() - before


def _child_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


if __name__ == "__main__":
    main()
