"""Calls that wait: without a credential, without a request, or with an answer that nobody reads."""

import asyncio

from attacks.attack import attack
from attacks.floods import repeat
from attacks.service import Service
from deaf_client import deaf_client
from grpc_health.v1 import health_pb2, health_pb2_grpc

from specpool.rpc.security.channel import Connector
from specpool.v1 import generation_pb2 as pb
from specpool.v1 import generation_pb2_grpc

WATCHES, UNSENT_CALLS, STREAMS, ANSWERS, POLLS = 256, 5000, 16, 7, 100
GENERATE, VERIFY = "/specpool.v1.GenerationService/Generate", "/specpool.v1.TargetWorkerService/VerifyStream"
EMPTY_ITEMS = b"\x1a\x00" * (29 * 2**20 // 2)
LONG_ANSWER = pb.GenerateRequest(
    tokenized=pb.TokenizedInput(input_ids=[5]),
    sampling_params=pb.SamplingParams(n=16, temperature=1.0, max_tokens=2500, ignore_eos=True, logprobs=20),
)
"""Its answer takes 7 MiB."""


async def watch_without_token(address: str) -> None:
    """Hold watches open without a token."""
    async with Connector(address).open() as channel:
        stub = health_pb2_grpc.HealthStub(channel)

        async def watch() -> None:
            async for _ in stub.Watch(health_pb2.HealthCheckRequest()):
                pass

        await repeat(WATCHES, watch)


@attack("256 health watches without a token at the target worker", "workers")
async def watches_at_target(service: Service) -> None:
    await watch_without_token(service.target)


@attack("256 health watches without a token at the coordinator")
async def watches_at_coordinator(service: Service) -> None:
    await watch_without_token(service.coordinator)


@attack("256 health watches at the health port")
async def watches_at_health_port(service: Service) -> None:
    await watch_without_token(service.health)


@attack("5,000 calls without a request")
async def unsent_calls(service: Service) -> None:
    async with Connector(service.coordinator).open() as channel:
        call = channel.stream_unary(GENERATE)
        await repeat(UNSENT_CALLS, lambda: call(metadata=service.metadata("attacker")))


@attack("16 round streams of 29 MiB of empty items", "workers")
async def empty_rounds(service: Service) -> None:
    """With the worker's token."""
    async with Connector(service.target).open() as channel:

        async def send() -> None:
            stream = channel.stream_stream(VERIFY)(metadata=service.metadata("coordinator"))
            await stream.write(EMPTY_ITEMS)
            await stream.read()

        await repeat(STREAMS, send)


@attack("7 unread unary answers of 7 MiB", worker_flags=("--pass-ms", "0.5"))
async def unread_answers(service: Service) -> None:
    async with deaf_client(service.coordinator) as client:
        for _ in range(ANSWERS):
            await client.call(GENERATE, LONG_ANSWER.SerializeToString(), **dict(service.metadata("attacker")))
        await asyncio.Event().wait()


@attack("100 GetServerInfo a second")
async def polls(service: Service) -> None:
    async with Connector(service.coordinator).open() as channel:
        stub = generation_pb2_grpc.GenerationServiceStub(channel)
        request, metadata = pb.GetServerInfoRequest(), service.metadata("attacker")
        while True:
            await asyncio.gather(stub.GetServerInfo(request, metadata=metadata), asyncio.sleep(1 / POLLS))
