"""Compare generation memory and speed of chats as the workers' memory limit falls, on the CPU.

    python -m benchmarks.memory [--limits none,1200MiB,1100MiB] [--chats 8] [--turns 2] [--tokens 64] [--repeats 3]
        [--concurrency 1] [--max-model-len 1024] [--prompts FILE] [--no-peer] [--output FOLDER]

Each system answers the same chats in processes of its own, and the systems take turns: the service without a limit, the
service with each --memory-limit for both workers, and assisted generation of transformers with the same pair in
float32, one chat at a time. A chat asks several questions. Each prompt has all earlier questions and answers.

Generation memory is the peak of resident memory during the chats, less the resident memory before them: the KV caches
and activations of target and draft, without weights and libraries. The table shows medians, and whether every answer
has the tokens of the first run. The last line printed is JSON.
"""

import argparse
import asyncio
import json
import re
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
from pydantic import ByteSize, TypeAdapter, ValidationError

from benchmarks.prompts import add_prompts, checked, load_prompts
from benchmarks.report import finish, output_folder, parser_of, show, whole
from benchmarks.runs import Run, in_turns
from specpool.cli.processes import ProcessFailedError, worker_environment
from specpool.cli.up import running
from specpool.cli.up_settings import UpSettings
from specpool.client import AsyncClient
from specpool.engine.models.embedded_pair import embedded_pair

MIB = 2**20
NO_LIMIT = "none"
ASSISTED = "assisted generation"
RESET_PEAK = "5"
"""Written to `clear_refs`, it resets the peak of a process's resident memory."""
Answers = list[list[int]]


def main() -> None:
    options = parse()
    try:
        result = asyncio.run(compare(options))
    except (OSError, ProcessFailedError) as error:
        raise SystemExit(f"memory: {error}") from None
    show("generation memory", result["rows"])
    finish("memory", result, options.output)


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Options of the command line, with the chats as lists of questions."""
    parser = parser_of(__doc__)
    parser.add_argument("--limits", type=_limits, default=f"{NO_LIMIT},1200MiB,1100MiB", help="memory of a worker")
    parser.add_argument("--chats", type=whole(1, 10_000), default=8)
    parser.add_argument("--turns", type=whole(1, 100), default=2, help="questions of a chat")
    parser.add_argument("--tokens", type=whole(1, 1024), default=64, help="maximum tokens of an answer")
    parser.add_argument("--repeats", type=whole(1, 1000), default=3)
    parser.add_argument("--concurrency", type=whole(1, 256), default=1, help="chats at a time in the service")
    parser.add_argument("--max-model-len", type=whole(64, 2**20), default=1024, help="positions of a sequence")
    parser.add_argument("--no-peer", action="store_true", help="leave out transformers")
    add_prompts(parser)
    parser.add_argument("--output", type=output_folder, help="folder for the result")
    options = parser.parse_args(arguments)
    lines = checked(parser, lambda: load_prompts(options.prompts, options.chats * options.turns))
    questions = [line.prompt if isinstance(line.prompt, str) else str(line.prompt[-1]["content"]) for line in lines]
    options.questions = [questions[i : i + options.turns] for i in range(0, len(questions), options.turns)]
    return options


def _limits(text: str) -> list[str]:
    for limit in text.split(","):
        try:
            limit == NO_LIMIT or TypeAdapter(ByteSize).validate_python(limit)
        except ValidationError:
            raise argparse.ArgumentTypeError(f"{limit!r} is neither {NO_LIMIT} nor a size such as 900MiB") from None
    return text.split(",")


async def compare(options: argparse.Namespace) -> dict[str, Any]:
    """Let the systems take turns. ProcessFailedError, OSError."""
    peers = [] if options.no_peer else [ASSISTED]

    async def run(system: str) -> Run:
        return await (assist if system == ASSISTED else serve)(options, system)

    # The smallest limits usually come last, and fail at once if they are too small.
    runs = await in_turns([*reversed(options.limits), *peers], options.repeats, run, "systems")
    first = runs[options.limits[0]][0]
    rows = []
    for system in (*options.limits, *peers):
        own = runs[system]
        speed, memory = (statistics.median(run[name] for run in own) for name in ("tokens_per_s", "generation_mib"))
        is_exact = all(run["answers"] == first["answers"] for run in own)
        rows.append(
            {
                "system": system if system == ASSISTED else f"limit {system}",
                "generation_mib": round(memory, 1),
                "tokens_per_s": round(speed, 1),
                "of_first": round(speed / statistics.median(run["tokens_per_s"] for run in runs[options.limits[0]]), 3),
                "same_tokens": is_exact,
            }
        )
    return {"concurrency": options.concurrency, "turns": options.turns, "tokens": options.tokens, "rows": rows}


async def serve(options: argparse.Namespace, limit: str) -> dict[str, Any]:
    sizes = {} if limit == NO_LIMIT else {"target_memory_limit": limit, "draft_memory_limit": limit}
    settings = UpSettings.model_validate(
        {"port": 0, "max_num_seqs": options.concurrency, "max_model_len": options.max_model_len, **sizes}
        | {"log_level": "error"}
    )
    async with running(settings) as address, AsyncClient(address) as client:
        children = psutil.Process().children(recursive=True)
        workers = [child.pid for child in children if any("_worker.server" in word for word in child.cmdline())]
        before = sum(map(reset_peak, workers))
        room, began = asyncio.Semaphore(options.concurrency), time.perf_counter()

        async def converse(questions: list[str]) -> Answers:
            chat: list[dict[str, str]] = []
            answers = []
            async with room:
                for question in questions:
                    chat.append({"role": "user", "content": question})
                    response = await client.generate(chat, max_tokens=options.tokens)
                    chat.append({"role": "assistant", "content": response.text})
                    answers.append(list(response.token_ids))
            return answers

        chats = await asyncio.gather(*map(converse, options.questions))
        seconds = time.perf_counter() - began
        peak = sum(map(peak_of, workers))
    return result(list(chats), seconds, peak - before)


async def assist(options: argparse.Namespace, system: str) -> dict[str, Any]:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "benchmarks.memory_assisted",
        env=worker_environment(),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    pair = embedded_pair()
    order = {"target": str(pair.target), "draft": str(pair.draft), "questions": options.questions}
    output, *_ = await process.communicate(json.dumps({**order, "tokens": options.tokens}).encode())
    if process.returncode:
        raise ProcessFailedError(f"transformers ended with status {process.returncode}")
    measured = json.loads(output)
    return result(measured["answers"], measured["seconds"], measured["bytes"])


def result(chats: list[Answers], seconds: float, generation_bytes: int) -> dict[str, Any]:
    tokens = sum(len(answer) for chat in chats for answer in chat)
    return {"answers": chats, "tokens_per_s": tokens / seconds, "generation_mib": generation_bytes / MIB}


def reset_peak(pid: int) -> int:
    """Reset the peak of a process's resident memory. Return the memory in bytes."""
    Path(f"/proc/{pid}/clear_refs").write_text(RESET_PEAK)
    return int(psutil.Process(pid).memory_info().rss)


def peak_of(pid: int) -> int:
    """The peak of a process's resident memory in bytes."""
    match = re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    return 1024 * int(match[1]) if match is not None else 0


if __name__ == "__main__":
    if not sys.platform.startswith("linux"):
        raise SystemExit("memory: needs Linux, which reports the peak of resident memory")
    main()
