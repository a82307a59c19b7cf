"""Compare the service with llama.cpp on the CPU, with the same GGUF file, by requests in flight.

    python3 -m venv DIR && DIR/bin/pip install xllamacpp
    env SPECPOOL_LLAMACPP_PYTHON=DIR/bin/python python -m benchmarks.llamacpp
        [--concurrency 1,4,8,16] [--tokens 64] [--repeats 5] [--gguf FILE] [--prompts FILE] [--output FOLDER]

Three systems take turns, and only one computes at a time: llama.cpp's server with one slot per request in flight;
"plain", the service without speculation; and "default", the service with speculation. llama.cpp is PyPI's xllamacpp in
its own environment. All systems get the same token ids and threads, prefill every prompt, and decode greedily. The
first turn does not count. Ratios to llama.cpp are taken within a turn; the table shows medians, minimum and maximum.

`same tokens` is the share of tokens before the first difference from llama.cpp's first answer. It does not measure
quality: the systems round and sum differently, so near-ties may resolve differently. With `ignore_eos`, llama.cpp
never chooses the end token, but the service may choose it and continue. The last line printed is JSON.
"""

import argparse
import asyncio
import statistics
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

from benchmarks.llamacpp_process import Engine, completion, environment, only_gguf, running_llamacpp
from benchmarks.prompts import add_prompts, checked, load_prompts, number_of_prompts, token_ids
from benchmarks.report import console, finish, output_folder, parser_of, progress, show, whole, wholes
from benchmarks.runs import spread
from specpool.cli.processes import ProcessFailedError
from specpool.cli.up import running
from specpool.cli.up_settings import UpSettings
from specpool.client import AsyncClient
from specpool.client.requests import GenerateOptions
from specpool.engine.models.embedded_pair import Pair, embedded_pair
from specpool.rpc.status import status_line

LLAMACPP = "llama.cpp"
SERVICE: dict[str, GenerateOptions] = {"plain": {"num_speculative_tokens": 0}, "default": {}}
HEADINGS = {
    "concurrency": "at once", "system": "system", "tokens_per_s": "tokens/s", "ratio": "ratio to llama.cpp",
    "ratio_min": "min", "ratio_max": "max", "same_tokens": "same tokens",
}  # fmt: skip
TokenIds = list[list[int]]
Answer = Callable[[list[int]], Awaitable[list[int]]]


@dataclass(frozen=True)
class Run:
    outputs: TokenIds
    seconds: float

    @property
    def tokens_per_s(self) -> float:
        """Tokens of all answers per second, prefill included."""
        return sum(map(len, self.outputs)) / self.seconds


def main() -> None:
    options = parse()
    try:
        python, version = environment()
        pair = embedded_pair()
        engine = Engine(python, options.gguf or only_gguf(pair.target), UpSettings(port=0).threads)
        rows = asyncio.run(serve(pair, engine, options))
    except grpc.aio.AioRpcError as error:
        raise SystemExit(f"llamacpp: {status_line(error)}") from None
    except (OSError, RuntimeError, ProcessFailedError) as error:
        raise SystemExit(f"llamacpp: {error}") from None
    show("tokens/s", [{heading: row[name] for name, heading in HEADINGS.items()} for row in rows])
    setup = {"xllamacpp": version, "gguf": engine.gguf.name, "threads": engine.threads}
    finish("llamacpp", {**setup, "tokens": options.tokens, "repeats": options.repeats, "rows": rows}, options.output)


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Options of the command line, with the prompts."""
    parser = parser_of(__doc__)
    parser.add_argument("--concurrency", type=wholes(1, 256), default="1,4,8,16", help="requests in flight")
    parser.add_argument("--tokens", type=whole(1, 1024), default=64, help="tokens of each answer")
    parser.add_argument("--repeats", type=whole(1, 1000), default=5)
    parser.add_argument("--gguf", type=_file, help="the target's GGUF file; default: the file of the embedded target")
    add_prompts(parser)
    parser.add_argument("--output", type=output_folder, help="folder for the result")
    options = parser.parse_args(arguments)
    options.lines = checked(parser, lambda: load_prompts(options.prompts, number_of_prompts(max(options.concurrency))))
    return options


def _file(name: str) -> Path:
    if not Path(name).is_file():
        raise argparse.ArgumentTypeError(f"{name} is not a file")
    return Path(name)


async def serve(pair: Pair, engine: Engine, options: argparse.Namespace) -> list[dict[str, Any]]:
    prompts = token_ids(pair.target, options.lines)
    settings = UpSettings(
        port=0, log_level="error", drain_seconds=1, prefix_caching=False, max_num_seqs=max(options.concurrency),
        threads=engine.threads, target=str(pair.target), draft=str(pair.draft),
    )  # fmt: skip
    console.print("starting the service")
    async with running(settings) as address, AsyncClient(address) as client:
        return await measure(client, engine, prompts, options)


async def measure(
    client: AsyncClient, engine: Engine, prompts: TokenIds, options: argparse.Namespace
) -> list[dict[str, Any]]:
    rows = []
    for concurrency in options.concurrency:
        some = prompts[: number_of_prompts(concurrency)]
        context = max(map(len, some)) + options.tokens
        async with running_llamacpp(engine, concurrency, context) as address:
            systems: dict[str, Answer] = {
                LLAMACPP: answer_of_llamacpp(address, options.tokens),
                **{name: answer_of_service(client, options.tokens, kind) for name, kind in SERVICE.items()},
            }
            turns = progress(range(1 + options.repeats), f"{concurrency} at a time")
            runs = [
                {name: await timed_run(answer, some, concurrency) for name, answer in systems.items()} for _ in turns
            ]
        rows += [summary(concurrency, name, runs) for name in systems]
    return rows


async def timed_run(answer: Answer, prompts: TokenIds, concurrency: int) -> Run:
    """Collect all answers, with `concurrency` requests in flight."""
    free = asyncio.Semaphore(concurrency)

    async def one(prompt: list[int]) -> list[int]:
        async with free:
            return await answer(prompt)

    began = time.perf_counter()
    outputs = await asyncio.gather(*map(one, prompts))
    return Run(outputs, time.perf_counter() - began)


def answer_of_llamacpp(address: str, tokens: int) -> Answer:
    async def answer(prompt: list[int]) -> list[int]:
        return [token async for message in completion(address, prompt, tokens) for token in message]

    return answer


def answer_of_service(client: AsyncClient, tokens: int, kind: GenerateOptions) -> Answer:
    options: GenerateOptions = {"max_tokens": tokens, "ignore_eos": True, "temperature": 0.0, **kind}

    async def answer(prompt: list[int]) -> list[int]:
        return list((await client.generate(prompt, **options)).token_ids)

    return answer


def summary(concurrency: int, system: str, turns: Sequence[Mapping[str, Run]]) -> dict[str, Any]:
    """The row of a system; the first turn does not count."""
    counted = turns[1:]
    ratios = [turn[system].tokens_per_s / turn[LLAMACPP].tokens_per_s for turn in counted]
    same = [same_tokens(turn[system].outputs, turns[0][LLAMACPP].outputs) for turn in counted]
    return {
        "concurrency": concurrency,
        "system": system,
        "tokens_per_s": round(statistics.median(turn[system].tokens_per_s for turn in counted), 1),
        **spread(ratios),
        "same_tokens": round(statistics.median(same), 3),
    }


def same_tokens(outputs: TokenIds, others: TokenIds) -> float:
    """Share of the tokens before the first difference of each answer."""
    equal = sum(
        next((i for i, (one, other) in enumerate(zip(answer, reference, strict=True)) if one != other), len(answer))
        for answer, reference in zip(outputs, others, strict=True)
    )
    return equal / sum(map(len, outputs))


if __name__ == "__main__":
    main()
