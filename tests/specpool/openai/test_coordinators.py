"""Several coordinators: prefix affinity within a load limit, and failover."""

import asyncio
from collections.abc import Iterable
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
from certificates import Authority
from openai import AsyncOpenAI
from openai_service import KEY, MODEL, openai_server
from scripted_target import ScriptedTarget
from secure_service import until
from serving import Serving, free_address, serving

from specpool.openai import coordinators
from specpool.openai.coordinators import Coordinators
from specpool.rpc import discovery

CHAT = [{"role": "user", "content": "Hi"}]


async def some_coordinators(stack: AsyncExitStack, count: int) -> list[Serving]:
    services = [serving(ScriptedTarget(), served_model_name=MODEL) for _ in range(count)]
    return [await stack.enter_async_context(service) for service in services]


async def connect(stack: AsyncExitStack, *addresses: str) -> tuple[Coordinators, AsyncOpenAI]:
    """Start an HTTP server in front of these coordinators. Return its view of them, and a client."""
    server, url = await stack.enter_async_context(openai_server(",".join(addresses)))
    client = AsyncOpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0)
    return server.coordinators, await stack.enter_async_context(client)


def requests_of(services: Iterable[Serving]) -> list[int]:
    return [service.process.coordinator.in_flight.requests for service in services]


def chat_about(subject: str, turns: int = 1) -> list[dict[str, str]]:
    first = {"role": "user", "content": subject}
    later = [{"role": "assistant", "content": "Yes"}, {"role": "user", "content": "More"}] * (turns - 1)
    return [{"role": "system", "content": "Be kind."}, first, *later]


async def test_a_conversation_keeps_its_coordinator_and_others_spread() -> None:
    async with AsyncExitStack() as stack:
        services = await some_coordinators(stack, 3)
        coordinators, client = await connect(stack, *(service.address for service in services))
        await until(lambda: all(link.is_serving for link in coordinators.ranked(b"")))
        create = client.chat.completions.create
        for turns in range(1, 5):
            await create(model=MODEL, messages=chat_about("roses", turns))
        assert sorted(requests_of(services)) == [0, 0, 4]
        for number in range(30):
            await create(model=MODEL, messages=chat_about(f"number {number}"))
        assert min(requests_of(services)) > 0


async def test_an_overloaded_coordinator_loses_its_prefixes() -> None:
    async with AsyncExitStack() as stack:
        services = await some_coordinators(stack, 2)
        coordinators, client = await connect(stack, *(service.address for service in services))
        await until(lambda: all(link.is_serving for link in coordinators.ranked(b"")))
        for service in services:
            service.target.open.clear()
        create = client.chat.completions.create
        running = [asyncio.create_task(create(model=MODEL, messages=chat_about("roses"))) for _ in range(8)]
        await until(lambda: sum(requests_of(services)) == 8)
        assert sorted(requests_of(services)) == [3, 5]
        for service in services:
            service.target.open.set()
        await asyncio.gather(*running)


async def test_requests_continue_when_a_coordinator_dies() -> None:
    async with AsyncExitStack() as stack:
        [service] = await some_coordinators(stack, 1)
        coordinators, client = await connect(stack, free_address(), service.address)
        # Also before the first health check.
        for number in range(8):
            answer = await client.chat.completions.create(model=MODEL, messages=chat_about(f"number {number}"))
            assert answer.choices[0].message.content == "Hello"
        await until(lambda: coordinators.is_serving)
        assert [link.address for link in coordinators.ranked(b"")] == [service.address]


async def test_only_a_coordinator_that_stays_unreachable_is_warned_about(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(coordinators, "RETRY_SECONDS", 0.01)
    address = free_address()
    starting = Coordinators([address], {})
    monkeypatch.setattr(coordinators, "START_SECONDS", 0.0)
    absent = Coordinators([free_address()], {})
    try:
        await until(lambda: "is unreachable" in caplog.text)
        async with serving(ScriptedTarget(), port=int(address.rpartition(":")[2])):
            await until(lambda: starting.is_serving)
        assert f"coordinator {address} is unreachable" not in caplog.text.partition(f"{address} serves")[0]
        await until(lambda: f"coordinator {address} is unreachable" in caplog.text)
    finally:
        await starting.close()
        await absent.close()


async def test_wrong_tls_settings_are_warned_about_at_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with serving(ScriptedTarget()) as service:
        front = Coordinators([service.address], {"tls_ca": Authority(tmp_path).path})
        try:
            await until(lambda: "does not use TLS" in caplog.text)
        finally:
            await front.close()


async def test_records_of_a_name_are_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    records = ["127.0.0.1"]

    async def resolve(host: str, port: int) -> list[str]:
        assert host == "coordinators"
        return records

    monkeypatch.setattr(discovery, "_resolve", resolve)
    monkeypatch.setattr(discovery, "RESOLVE_SECONDS", 0.01)
    following = Coordinators(["dns:///coordinators:50050"], {})
    try:
        await until(lambda: addresses_of(following) == ["127.0.0.1:50050"])
        records[:] = ["127.0.0.2", "127.0.0.3"]
        await until(lambda: addresses_of(following) == ["127.0.0.2:50050", "127.0.0.3:50050"])
    finally:
        await following.close()


def addresses_of(followed: Coordinators) -> list[str]:
    return sorted(link.address for link in followed.ranked(b""))
