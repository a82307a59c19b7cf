"""Specpool's service beside llama.cpp with the same GGUF file on the CPU, by requests in flight.

    python -m benchmarks.llamacpp [--concurrency 1,4,8,16] [--tokens 64] [--repeats 5] [--gguf FILE] [--output FOLDER]

Three systems take turns, and only one computes at a time: llama.cpp's server, with as many slots as requests are in
flight; plain, the service without speculation; default, the service that chooses draft lengths itself. All get the
same token ids as prompts and as many threads, prefill every prompt, decode greedily and give `--tokens` tokens;
llama.cpp is asked over HTTP, the service over gRPC. llama.cpp is PyPI's `xllamacpp`, in an environment of its own,
whose Python `SPECPOOL_LLAMACPP_PYTHON` names:

    python3 -m venv DIR && DIR/bin/pip install xllamacpp
    env SPECPOOL_LLAMACPP_PYTHON=DIR/bin/python python -m benchmarks.llamacpp

The first turn does not count. Ratios to llama.cpp are taken within a turn; medians, least and greatest are shown.

`same tokens` is information and no goal: the share of tokens before the first that differs from llama.cpp's answer of
the first turn. llama.cpp rounds activations to 8 bits, so that its answers can depend on what else is in flight; and
when told to ignore the end token it never chooses it, while the service may choose it and go on. The last line printed
is JSON.
"""

import argparse
import asyncio
import statistics
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import grpc

from benchmarks.llamacpp_process import LlamaCpp, environment, running_llamacpp
from benchmarks.prompts import load_prompts, number_of_prompts
from benchmarks.report import console, finish, output_folder, progress, show, whole
from benchmarks.vllm_process import token_ids
from specpool.cli.processes import ProcessFailedError
from specpool.cli.up import UpSettings, running
from specpool.client import AsyncClient
from specpool.client.requests import GenerateOptions
from specpool.engine.models.embedded_pair import Pair, embedded_pair
from specpool.rpc.status import status_line

LLAMACPP = "llama.cpp"
OURS: dict[str, GenerateOptions] = {"plain": {"num_speculative_tokens": 0}, "default": {}}
HEADINGS = {
    "concurrency": "at once",
    "system": "system",
    "tokens_per_s": "tokens/s",
    "ratio": "ratio to llama.cpp",
    "ratio_min": "least",
    "ratio_max": "greatest",
    "same_tokens": "same tokens",
}
TokenIds = list[list[int]]


@dataclass(frozen=True)
class Run:
    """The answers of one system to all prompts."""

    outputs: TokenIds
    seconds: float

    @property
    def tokens_per_s(self) -> float:
        """Tokens of all answers by the time in which they were given, prefill included."""
        return sum(map(len, self.outputs)) / self.seconds


@dataclass(frozen=True)
class Engine:
    """What llama.cpp runs with."""

    python: str
    gguf: Path
    threads: int


def main() -> None:
    """Parses the command line, measures, prints."""
    options = parse()
    try:
        its = environment()
        pair = embedded_pair()
        engine = Engine(its.python, options.gguf or only_gguf(pair.target), UpSettings(port=0).threads)
        rows = asyncio.run(serve(pair, engine, options))
    except grpc.aio.AioRpcError as error:
        raise SystemExit(f"llamacpp: {status_line(error)}") from None
    except (OSError, RuntimeError, ProcessFailedError) as error:
        raise SystemExit(f"llamacpp: {error}") from None
    show("tokens/s", [{heading: row[name] for name, heading in HEADINGS.items()} for row in rows])
    given = {"xllamacpp": its.version, "gguf": engine.gguf.name, "threads": engine.threads}
    finish("llamacpp", {**given, "tokens": options.tokens, "repeats": options.repeats, "rows": rows}, options.output)


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Options of the command line, with the prompts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--concurrency", type=_concurrencies, default="1,4,8,16", help="requests in flight")
    parser.add_argument("--tokens", type=whole(1, 1024), default=64, help="tokens of each answer")
    parser.add_argument("--repeats", type=whole(1, 1000), default=5)
    parser.add_argument("--gguf", type=_file, help="the target's GGUF file; default: that of the embedded target")
    parser.add_argument("--prompts", type=Path, help="JSONL file; default: the prompts that come with Specpool")
    parser.add_argument("--output", type=output_folder, help="folder for the result")
    options = parser.parse_args(arguments)
    try:
        options.lines = load_prompts(options.prompts, number_of_prompts(max(options.concurrency)))
    except ZeroDivisionError:
        parser.error(f"--prompts: {options.prompts} holds none")
    except (OSError, ValueError, LookupError, TypeError) as error:
        parser.error(f"--prompts: {error}")
    return options


def _concurrencies(text: str) -> list[int]:
    return [whole(1, 256)(number) for number in text.split(",")]


def _file(name: str) -> Path:
    if not Path(name).is_file():
        raise argparse.ArgumentTypeError(f"{name} is not a file")
    return Path(name)


def only_gguf(folder: Path) -> Path:
    """The GGUF file of a model folder. RuntimeError: it has none, or several."""
    files = list(folder.glob("*.gguf"))
    if len(files) != 1:
        raise RuntimeError(f"{folder} has {len(files)} GGUF files, not one: --gguf names one")
    return files[0]


async def serve(pair: Pair, engine: Engine, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Starts the service; the rows of `measure`."""
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
    """A row for each concurrency and system: medians over the turns that count."""
    rows = []
    for concurrency in options.concurrency:
        some = prompts[: number_of_prompts(concurrency)]
        context = max(map(len, some)) + options.tokens
        async with running_llamacpp(engine.python, engine.gguf, concurrency, engine.threads, context) as llamacpp:
            systems: dict[str, Callable[[], Awaitable[Run]]] = {
                LLAMACPP: partial(theirs, llamacpp, some, options.tokens),
                **{name: partial(ours, client, some, options.tokens, concurrency, its) for name, its in OURS.items()},
            }
            turns = progress(range(1 + options.repeats), f"{concurrency} at a time")
            runs = [{name: await run() for name, run in systems.items()} for _ in turns]
        rows += [summary(concurrency, name, runs) for name in systems]
    return rows


async def theirs(server: LlamaCpp, prompts: TokenIds, tokens: int) -> Run:
    """llama.cpp's answers; as many requests are in flight as it has slots."""
    return Run(**await server.ask({"prompts": prompts, "tokens": tokens}))


async def ours(client: AsyncClient, prompts: TokenIds, tokens: int, concurrency: int, its: GenerateOptions) -> Run:
    """The service's answers, with `concurrency` requests in flight."""
    options: GenerateOptions = {"max_tokens": tokens, "ignore_eos": True, "temperature": 0.0, **its}
    free = asyncio.Semaphore(concurrency)

    async def answer(prompt: list[int]) -> list[int]:
        async with free:
            return list((await client.generate(prompt, **options)).token_ids)

    began = time.perf_counter()
    outputs = await asyncio.gather(*map(answer, prompts))
    return Run(outputs, time.perf_counter() - began)


def summary(concurrency: int, system: str, turns: Sequence[Mapping[str, Run]]) -> dict[str, Any]:
    """The row of a system; the first turn does not count."""
    counted = turns[1:]
    ratios = [turn[system].tokens_per_s / turn[LLAMACPP].tokens_per_s for turn in counted]
    same = [same_tokens(turn[system].outputs, turns[0][LLAMACPP].outputs) for turn in counted]
    return {
        "concurrency": concurrency,
        "system": system,
        "tokens_per_s": round(statistics.median(turn[system].tokens_per_s for turn in counted), 1),
        "ratio": round(statistics.median(ratios), 3),
        "ratio_min": round(min(ratios), 3),
        "ratio_max": round(max(ratios), 3),
        "same_tokens": round(statistics.median(same), 3),
    }


def same_tokens(outputs: TokenIds, others: TokenIds) -> float:
    """The share of the tokens that come before the first one that differs in their answer."""
    equal = sum(
        next((i for i, (one, other) in enumerate(zip(mine, its, strict=True)) if one != other), len(mine))
        for mine, its in zip(outputs, others, strict=True)
    )
    return equal / sum(map(len, outputs))


if __name__ == "__main__":
    main()
