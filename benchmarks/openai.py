"""Compare streams over OpenAI's HTTP API with gRPC streams from the same coordinator, by concurrent streams.

    python -m benchmarks.openai [--streams 1,8,32] [--tokens 200] [--repeats 5] [--prompts FILE] [--output FOLDER]
    python -m benchmarks.openai --coordinator 127.0.0.1:50050 --http 127.0.0.1:8000

By default, the coordinator has fake workers whose passes take `--pass-ms`, and all processes run on this machine. With
`--coordinator` and `--http`, a running service is measured, such as `specpool up`. HTTP and gRPC alternate, and
ratios compare runs of the same repeat. The clients parse every message. The last line printed is JSON.
"""

import argparse
import asyncio
import json
import statistics
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any

from benchmarks.cost.fakes import start_coordinator, start_fakes, start_process, wait_ready
from benchmarks.prompts import add_prompts, checked, load_prompts, number_of_prompts
from benchmarks.report import finish, output_folder, parser_of, real, show, whole, wholes
from benchmarks.runs import Run, in_turns, ratios, spread
from specpool.client import AsyncClient
from specpool.client.prompts import PromptLine
from specpool.client.requests import make_request
from specpool.rpc.ports import free_port

GOAL_RATIO, GOAL_STREAMS = 0.95, 8
READY_SECONDS, DONE, DATA = 60, b"[DONE]", b"data: "

Generate = Callable[[PromptLine], Awaitable[int]]
"""Generates an answer as a stream. Returns its number of tokens."""


def main(arguments: list[str] | None = None) -> None:
    options = parse(arguments)
    with ExitStack() as stack:
        if options.coordinator is None:
            options.coordinator, options.http = start_service(stack, options.pass_ms)
        runs = asyncio.run(measure(options))
    rows = []
    for streams in options.streams:
        http, grpc = runs["http", streams], runs["grpc", streams]
        speeds = {f"{kind}_tokens_per_s": round(statistics.median(run["tokens_per_s"] for run in each), 1)
                  for kind, each in (("http", http), ("grpc", grpc))}  # fmt: skip
        rows.append({"streams": streams, **speeds, **spread(ratios(http, grpc, "tokens_per_s"))})
    show("streams over HTTP and gRPC", rows)
    result = {"rows": rows, "tokens": options.tokens, "goal_ratio": GOAL_RATIO, "goal_streams": GOAL_STREAMS}
    finish("openai", result, options.output)


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = parser_of(__doc__, prog="python -m benchmarks.openai")
    parser.add_argument("--streams", type=wholes(1, 256), default=[1, 8, 32], help="streams at a time")
    parser.add_argument("--tokens", type=whole(1, 4000), default=200, help="tokens of each answer")
    parser.add_argument("--repeats", type=whole(1, 1000), default=5)
    parser.add_argument("--pass-ms", type=real(0, 10_000), default=5.0, help="time of a fake worker's pass")
    parser.add_argument("--coordinator", metavar="HOST:PORT", help="a running coordinator; default: start one")
    parser.add_argument("--http", metavar="HOST:PORT", help="its HTTP server, without TLS")
    parser.add_argument("--output", type=output_folder)
    add_prompts(parser)
    options = parser.parse_args(arguments)
    if (options.coordinator is None) != (options.http is None):
        parser.error("--coordinator and --http must be given together")
    options.lines = checked(parser, lambda: load_prompts(options.prompts, number_of_prompts(max(options.streams))))
    return options


def start_service(stack: ExitStack, pass_ms: float) -> tuple[str, str]:
    """Start fake workers, a coordinator and an HTTP server. Return the addresses of the last two."""
    port, http_port = free_port(2), free_port()
    start_coordinator(stack, port, *start_fakes(stack, "--pass-ms", str(pass_ms)))
    address = f"127.0.0.1:{port}"
    flags = ("--coordinator-address", address, "--port", str(http_port), "--log-level", "error")
    start_process(stack, "-m", "specpool.openai", *flags)
    return address, f"127.0.0.1:{http_port}"


async def measure(options: argparse.Namespace) -> Mapping[tuple[str, int], list[Run]]:
    """Return the runs by kind and number of streams."""
    async with AsyncClient(options.coordinator) as client:
        await wait_ready(client, draft=False)
        await until_listening(options.http)
        model = (await client.model_info()).served_model_name
        kinds: dict[str, Generate] = {
            "http": partial(over_http, options.http, model, options.tokens),
            "grpc": partial(over_grpc, client, options.tokens),
        }
        cases = [(kind, streams) for streams in options.streams for kind in kinds]
        for kind, streams in cases:  # warm-up
            await timed(kinds[kind], options.lines[:streams], streams)
        return await in_turns(
            cases, options.repeats, lambda case: timed(kinds[case[0]], options.lines, case[1]), "streams"
        )


async def timed(generate: Generate, lines: list[PromptLine], streams: int) -> Run:
    """Answer prompts, `streams` at a time."""
    slots = asyncio.Semaphore(streams)

    async def one(line: PromptLine) -> int:
        async with slots:
            return await generate(line)

    began = time.perf_counter()
    tokens = await asyncio.gather(*map(one, lines[: number_of_prompts(streams)]))
    return {"tokens_per_s": sum(tokens) / (time.perf_counter() - began)}


async def over_grpc(client: AsyncClient, tokens: int, line: PromptLine) -> int:
    request = make_request(line.prompt, max_tokens=tokens, ignore_eos=True)
    async for message in client.stub.GenerateStream(request):
        if message.WhichOneof("response") == "complete":
            return int(message.complete.usage.completion_tokens)
    raise ValueError("the stream ended without a complete message")


async def over_http(address: str, model: str, tokens: int, line: PromptLine) -> int:
    prompt = {"prompt": line.prompt} if isinstance(line.prompt, str) else {"messages": line.prompt}
    route = "completions" if "prompt" in prompt else "chat/completions"
    body: dict[str, Any] = {"model": model, "max_tokens": tokens, "ignore_eos": True, "temperature": 0, **prompt}
    body |= {"stream": True, "stream_options": {"include_usage": True}}
    text = json.dumps(body).encode()
    host, _, port = address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        head = f"POST /v1/{route} HTTP/1.1\r\nhost: {host}\r\nconnection: close\r\ncontent-type: application/json\r\n"
        writer.write(f"{head}content-length: {len(text)}\r\n\r\n".encode() + text)
        event: Any = None
        async for received in reader:
            if received.startswith(DATA) and DONE not in received:
                event = json.loads(received[len(DATA) :])
        return int(event["usage"]["completion_tokens"])
    finally:
        writer.close()


async def until_listening(address: str) -> None:
    host, _, port = address.rpartition(":")
    async with asyncio.timeout(READY_SECONDS):
        while True:
            try:
                _, writer = await asyncio.open_connection(host, int(port))
            except OSError:
                await asyncio.sleep(0.1)
            else:
                writer.close()
                return


if __name__ == "__main__":
    main()
