"""No client takes another one's share of a server, and nobody without a credential counts."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from call_service import MESSAGE_BYTES, Calls, calls_server
from deaf_client import deaf_client
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from secure_service import until
from serving import PATIENCE_SECONDS

from specpool.rpc.ports import free_port
from specpool.rpc.server.calls import Pace, Rates, fair_share
from specpool.rpc.server.health import MAX_HEALTH_CALLS
from specpool.rpc.server.limits import LARGE_INVALID_BYTES

EXHAUSTED = grpc.StatusCode.RESOURCE_EXHAUSTED
SERVING = health_pb2.HealthCheckResponse.SERVING
CHECK = "/grpc.health.v1.Health/Check"
TOKENS = {name: f"{name}-0123456789abcdef" for name in ("greedy", "modest")}
MIB = 2**20


@pytest.fixture
def tokens(tmp_path: Path) -> Path:
    file = tmp_path / "tokens"
    file.write_text("".join(f"{name} {token}\n" for name, token in TOKENS.items()))
    return file


def bearer(name: str) -> tuple[tuple[str, str], ...]:
    return (("authorization", f"Bearer {TOKENS[name]}"),)


@asynccontextmanager
async def connected(**settings: Any) -> AsyncIterator[tuple[Calls, grpc.aio.Channel, str]]:
    async with calls_server(**settings) as (_, calls, address), grpc.aio.insecure_channel(address) as channel:
        yield calls, channel, address


def watch(channel: grpc.aio.Channel, metadata: Any = None) -> Any:
    return health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(), metadata=metadata)


async def status(channel: grpc.aio.Channel, metadata: Any = None) -> int:
    check = health_pb2_grpc.HealthStub(channel).Check(
        health_pb2.HealthCheckRequest(), metadata=metadata, timeout=PATIENCE_SECONDS
    )
    return (await check).status


def unsent(channel: grpc.aio.Channel, name: str) -> Any:
    """A call whose request never arrives."""
    return channel.stream_unary("/calls/One")(metadata=bearer(name))


async def answer(channel: grpc.aio.Channel, name: str, payload: bytes = b"a") -> bytes:
    reply: bytes = await channel.unary_unary("/calls/One")(payload, metadata=bearer(name), timeout=PATIENCE_SECONDS)
    return reply


# --- Calls without a credential


@pytest.mark.parametrize("settings", ["tokens", "open", "health_port"])
async def test_endless_watches_without_a_credential_block_no_probe(tokens: Path, settings: str) -> None:
    port = free_port()
    options: dict[str, Any] = {"tokens": {"api_tokens": tokens}, "open": {}, "health_port": {"health_port": port}}
    async with connected(**options[settings]) as (calls, channel, address):
        attacked = f"127.0.0.1:{port}" if settings == "health_port" else address
        metadata = bearer("modest") if settings == "tokens" else None
        async with grpc.aio.insecure_channel(attacked) as attacker:
            link = watch(attacker, metadata)
            assert (await link.read()).status == SERVING
            watches = [watch(attacker) for _ in range(MAX_HEALTH_CALLS + 50)]
            ends = await asyncio.gather(*(each.read() for each in watches), return_exceptions=True)
            assert all(getattr(end, "status", None) == SERVING for end in ends[-MAX_HEALTH_CALLS:])
            oldest = watches[0] if settings == "tokens" else link
            with pytest.raises(grpc.aio.AioRpcError, match="newer") as caught:
                await oldest.read()
            assert caught.value.code() is EXHAUSTED
            for probe in (attacker, channel):
                assert await status(probe) == SERVING
                if metadata is not None:
                    assert await status(probe, metadata) == SERVING
            if metadata is not None:
                assert not link.done(), "an authenticated watch does not compete"
            calls.open.set()
            assert await answer(channel, "modest") == b"a"


async def test_health_calls_without_a_request_block_no_probe(tokens: Path) -> None:
    async with connected(api_tokens=tokens) as (_, channel, address), deaf_client(address) as attacker:
        for _ in range(2 * MAX_HEALTH_CALLS):
            await attacker.call(CHECK, None)
        assert await status(channel) == await status(channel, bearer("modest")) == SERVING


async def test_large_health_requests_fail(tokens: Path) -> None:
    async with connected(api_tokens=tokens) as (_, channel, _):
        for metadata in (None, bearer("modest")):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await channel.unary_unary(CHECK)(b"\x0a\x83\xff\x03" + b"x" * 65411, metadata=metadata)
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_reflection_counts_as_a_call_of_its_client(tokens: Path) -> None:
    async with connected(api_tokens=tokens, max_calls_per_client=1) as (_, channel, _):
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        listing = stub.ServerReflectionInfo(metadata=bearer("greedy"))
        await listing.write(reflection_pb2.ServerReflectionRequest(list_services=""))
        assert (await listing.read()).list_services_response.service
        with pytest.raises(grpc.aio.AioRpcError, match="--max-calls-per-client"):
            await stub.ServerReflectionInfo(metadata=bearer("greedy")).read()
        listing.cancel()


# --- Shares of calls


def test_fair_share_is_max_min() -> None:
    assert fair_share([100, 100], 100) == 50
    assert fair_share([100, 3], 100) == 97
    assert fair_share([100, 3, 50], 100) == 48
    assert fair_share([10, 20], 100) == 100
    assert fair_share([7] * 100, 10) == 1, "everybody may have one"


async def test_calls_without_a_request_take_no_place_from_others(tokens: Path) -> None:
    async with connected(api_tokens=tokens, max_calls=20) as (calls, channel, _):
        idle = [unsent(channel, "greedy") for _ in range(60)]
        ends = {asyncio.create_task(each.code()) for each in idle}
        while len(ends) > 20:
            _, ends = await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        served = [asyncio.create_task(answer(channel, "modest")) for _ in range(10)]
        await until(lambda: calls.begun == 10)
        calls.open.set()
        assert await asyncio.gather(*served) == [b"a"] * 10
        for end in ends:
            end.cancel()


async def test_a_client_above_its_fair_share_is_refused_first(tokens: Path) -> None:
    async with connected(api_tokens=tokens, max_calls=8) as (calls, channel, _):
        greedy = [asyncio.create_task(answer(channel, "greedy")) for _ in range(8)]
        await until(lambda: calls.begun == 8)
        modest = [asyncio.create_task(answer(channel, "modest")) for _ in range(4)]
        await until(lambda: calls.begun == 12)
        for name in TOKENS:
            with pytest.raises(grpc.aio.AioRpcError, match="--max-calls") as caught:
                await answer(channel, name)
            assert caught.value.code() is EXHAUSTED
        calls.open.set()
        assert await asyncio.gather(*greedy, *modest) == [b"a"] * 12


# --- Answers that nobody reads


def of(name: str) -> dict[str, str]:
    return dict(bearer(name))


async def test_unread_answers_of_one_client_leave_memory_to_others(tokens: Path) -> None:
    async with (
        connected(api_tokens=tokens, request_memory=4 * MIB) as (calls, channel, address),
        deaf_client(address) as attacker,
    ):
        calls.open.set()
        for _ in range(8):
            await attacker.call("/calls/Large", b"%d" % MIB, **of("greedy"))
        await until(lambda: calls.begun >= 4)
        payload = bytes(MESSAGE_BYTES - 100)
        for _ in range(5):
            assert await answer(channel, "modest", payload) == payload
        own = [asyncio.create_task(answer(channel, "modest", payload)) for _ in range(2)]
        assert await asyncio.gather(*own) == [payload] * 2
        with pytest.raises(grpc.aio.AioRpcError, match="--request-memory"):
            await answer(channel, "greedy")


# --- Refusals


async def test_paced_clients_do_not_wait_for_each_other() -> None:
    pace = Pace(per_second=0.001)
    for client in TOKENS:
        await pace.turn(client)
    waiting = asyncio.create_task(pace.turn("greedy"))
    await pace.turn("another")
    assert not waiting.done()
    waiting.cancel()


async def test_refused_calls_do_not_pile_up(tokens: Path) -> None:
    rates = Rates(refusals_per_second=1, max_refusal_seconds=0.0)
    async with connected(rates=rates, api_tokens=tokens, max_calls=1) as (_, channel, _):
        calls = [asyncio.create_task(unsent(channel, "greedy").code()) for _ in range(30)]
        await until(lambda: len([call for call in calls if call.done()]) == 29)
        assert {call.result() for call in calls if call.done()} == {grpc.StatusCode.RESOURCE_EXHAUSTED}
        for call in calls:
            call.cancel()


async def test_requests_beyond_the_queue_are_refused_at_a_limited_rate(tokens: Path) -> None:
    async with connected(rates=Rates(refusals_per_second=0.25), api_tokens=tokens) as (_, channel, _):

        async def refused(name: str) -> grpc.StatusCode:
            return await channel.unary_unary("/calls/Full")(b"a", metadata=bearer(name)).code()

        assert await refused("greedy") is grpc.StatusCode.RESOURCE_EXHAUSTED
        waiting = asyncio.create_task(refused("greedy"))
        assert await refused("modest") is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert not waiting.done()
        waiting.cancel()


async def test_large_invalid_requests_of_one_client_are_refused_at_a_limited_rate(tokens: Path) -> None:
    async with connected(rates=Rates(invalid_bytes_per_second=1), api_tokens=tokens) as (_, channel, _):

        async def refused(name: str, size: int) -> grpc.StatusCode:
            return await channel.unary_unary("/calls/Refuse")(b"x" * size, metadata=bearer(name)).code()

        assert await refused("greedy", LARGE_INVALID_BYTES) is grpc.StatusCode.INVALID_ARGUMENT
        waiting = asyncio.create_task(refused("greedy", LARGE_INVALID_BYTES))
        for name, size in (("modest", LARGE_INVALID_BYTES), ("greedy", 100)):
            assert await refused(name, size) is grpc.StatusCode.INVALID_ARGUMENT
        assert not waiting.done()
        waiting.cancel()
