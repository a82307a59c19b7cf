"""Floods of calls, messages and tokens by a client with a token."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
from attacks.attack import attack
from attacks.service import Service

from specpool.rpc.security.channel import Connector
from specpool.v1 import generation_pb2 as pb
from specpool.v1 import generation_pb2_grpc

LARGEST = 2**20 - 1024
"""Bytes of the largest text that the coordinator accepts by default."""
LONG_PROMPT, PAUSE_SECONDS, TIMEOUT_SECONDS = 100_000, 0.05, 60

Stub = Any
Call = Callable[[Stub, tuple[tuple[str, str], ...]], Awaitable[Any]]


def generation(request: pb.GenerateRequest) -> Call:
    """One call of `Generate`."""
    return generations(lambda: request)


def generations(make_request: Callable[[], pb.GenerateRequest], timeout: float | None = TIMEOUT_SECONDS) -> Call:
    """One call of `Generate`, with another request each time."""
    return lambda stub, metadata: stub.Generate(make_request(), metadata=metadata, timeout=timeout)


def prompt(token_ids: list[int], **params: Any) -> pb.GenerateRequest:
    """A request for tokens."""
    return pb.GenerateRequest(
        tokenized=pb.TokenizedInput(input_ids=token_ids),
        sampling_params=pb.SamplingParams(**{"max_tokens": 8, **params}),
    )


def chat(messages: int, characters: int) -> pb.GenerateRequest:
    """A conversation of equal messages."""
    return pb.GenerateRequest(
        chat=pb.ChatInput(messages=[pb.ChatMessage(role="user", content="x" * characters)] * messages)
    )


async def repeat(count: int, call: Callable[[], Awaitable[object]]) -> None:
    """Keep this many calls in progress, each again once it has ended."""

    async def again() -> None:
        while True:
            try:
                await call()
            except grpc.aio.AioRpcError:
                await asyncio.sleep(PAUSE_SECONDS)

    await asyncio.gather(*(again() for _ in range(count)))


async def flood(service: Service, calls: int, call: Call) -> None:
    """Keep this many calls of the coordinator in progress."""
    async with Connector(service.coordinator).open() as channel:
        stub = generation_pb2_grpc.GenerationServiceStub(channel)
        await repeat(calls, lambda: call(stub, service.metadata("attacker")))


@attack("2,000 calls at once")
async def many_calls(service: Service) -> None:
    await flood(service, 2000, generation(prompt([1, 2, 3])))


@attack("60 largest messages")
async def large_messages(service: Service) -> None:
    await flood(service, 60, generation(pb.GenerateRequest(text="y " * (LARGEST // 2))))


@attack("60 messages that are too large")
async def too_large_messages(service: Service) -> None:
    await flood(service, 60, generation(pb.GenerateRequest(text="y" * 4 * LARGEST)))


@attack("6 chats of a million characters")
async def long_chats(service: Service) -> None:
    await flood(service, 6, generation(chat(1000, 1000)))


@attack("6 chats of 200,000 empty messages")
async def empty_messages(service: Service) -> None:
    await flood(service, 6, generation(chat(200_000, 0)))


@attack("16 prompts of 100,000 tokens")
async def long_prompts(service: Service) -> None:
    await flood(service, 16, generation(prompt([7] * LONG_PROMPT)))


@attack("64 samples")
async def many_samples(service: Service) -> None:
    await flood(service, 1, generation(prompt([1, 2, 3], n=64, temperature=1.0, max_tokens=200)))


@attack("16 requests with hostile stop strings")
async def hostile_stops(service: Service) -> None:
    """Stop strings that keep matching in part, and tokens that never complete a character."""
    stops = ["\ufffd" * 255 + str(number) for number in range(10)]
    bias = dict.fromkeys(range(148, 180), 90.0)
    await flood(service, 16, generation(prompt([1], max_tokens=4000, stop=stops, ignore_eos=True, logit_bias=bias)))


@attack("32 streams that are never read")
async def unread_streams(service: Service) -> None:
    request = prompt([5], max_tokens=LONG_PROMPT, ignore_eos=True)

    async def read_nothing(stub: Stub, metadata: tuple[tuple[str, str], ...]) -> None:
        call = stub.GenerateStream(request, metadata=metadata, timeout=TIMEOUT_SECONDS)
        await call.wait_for_connection()
        await asyncio.sleep(TIMEOUT_SECONDS)

    await flood(service, 32, read_nothing)
