"""Connections to the workers that are cut, swallowed, refused or delayed under load: no request fails or changes."""

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from serving import Serving, check_tokens, make_request, random_request, serving, stream

from specpool.testing import CuttingProxy, FakeDraft, FakeTarget, FakeWorker

CUTS = 60
"""Cuts of each kind; `python -m benchmarks.soak --cuts 3000` makes more of them, of real workers."""
AT_A_TIME = 8
MOST_PAUSE_SECONDS = 0.04
# A black hole is left behind in this time, and not after the minute that a round may take.
SOME_SECONDS = 10.0


class Behind(FakeWorker):
    """A worker behind a proxy."""

    def __init__(self, *arguments: Any, **knobs: Any) -> None:
        super().__init__(*arguments, **knobs)
        self.proxy = CuttingProxy()

    async def start(self, address: str = "127.0.0.1:0") -> str:
        return await self.proxy.start(await super().start(address))

    async def stop(self) -> None:
        await self.proxy.stop()
        await super().stop()


class TargetBehind(Behind, FakeTarget):
    """A target behind a proxy."""


class DraftBehind(Behind, FakeDraft):
    """A draft behind a proxy."""


def slow_workers() -> tuple[TargetBehind, DraftBehind]:
    """Workers whose passes take so long that cuts fall into rounds."""
    target = TargetBehind(pass_seconds=lambda rows: 0.002)
    return target, DraftBehind(target, pass_seconds=lambda rows: 0.0005)


@asynccontextmanager
async def load(served: Serving) -> AsyncIterator[None]:
    """Requests in flight at any time within the context. At its end none has failed, or has other tokens than those of
    plain decoding, or was counted twice; and all slots are free."""
    done = asyncio.Event()
    busy = asyncio.create_task(keep_busy(served, done))
    try:
        yield
    finally:
        done.set()
        sent = await busy
    info = await served.until_idle()
    assert dict(info.counters.finished) == {"length": sent}


async def keep_busy(served: Serving, done: asyncio.Event) -> int:
    """Has requests in flight until `done`, each with the tokens of plain decoding; returns their number."""
    chance = random.Random(0)
    sent = 0

    async def one_after_the_other(number: int) -> None:
        nonlocal sent
        while not done.is_set():
            request = random_request(chance)
            sent += 1
            if number % 2:
                await served.expect(request)
            else:
                check_tokens(served.target, request, (await stream(served, request))[1])

    async with asyncio.TaskGroup() as tasks:
        for number in range(AT_A_TIME):
            tasks.create_task(one_after_the_other(number))
    return sent


async def cut_often(proxies: list[CuttingProxy], cuts: int) -> None:
    """Cuts one of the links at a time, at random moments."""
    chance = random.Random(1)
    for _ in range(cuts):
        await asyncio.sleep(chance.uniform(0, MOST_PAUSE_SECONDS))
        chance.choice(proxies).cut()


@pytest.mark.parametrize("links", ["target", "draft", "both"])
async def test_cuts_lose_and_double_nothing(links: str) -> None:
    target, draft = slow_workers()
    proxies = {"target": [target.proxy], "draft": [draft.proxy], "both": [target.proxy, draft.proxy]}[links]
    async with serving(target, draft) as served, load(served):
        await cut_often(proxies, CUTS)
    # A draft that is cut off rests, for longer and longer, and meanwhile has no connection.
    assert sum(proxy.connections_cut for proxy in proxies) > (CUTS / 4 if links != "draft" else 1)


@pytest.mark.parametrize("link", ["target", "draft"])
async def test_connections_that_swallow_everything_are_left_behind(link: str) -> None:
    """Nothing says that they are dead: a new connection would work at once."""
    target, draft = slow_workers()
    proxy = {"target": target, "draft": draft}[link].proxy
    async with serving(target, draft, draft_timeout_seconds=0.5) as served:
        running = [asyncio.create_task(served.expect(make_request([i], 200))) for i in range(4)]
        await served.until(lambda info: info.counters.completion_tokens > 20)
        before = proxy.accepted
        proxy.swallow()
        async with asyncio.timeout(SOME_SECONDS):
            await asyncio.gather(*running)
            await served.until(lambda _: proxy.accepted > before)
        await served.until_ready()
        assert (await served.expect(make_request())).speculative_decoding.num_draft_tokens > 0


@pytest.mark.parametrize("link", ["target", "draft"])
async def test_silence_that_ends_costs_time_only(link: str) -> None:
    target, draft = slow_workers()
    proxy = {"target": target, "draft": draft}[link].proxy
    async with serving(target, draft, draft_timeout_seconds=0.2) as served, load(served):
        for _ in range(3):
            await asyncio.sleep(0.2)
            proxy.black_hole(True)
            await asyncio.sleep(0.3)
            proxy.black_hole(False)
    assert proxy.bytes_swallowed > 0


async def test_a_worker_that_refuses_connections_for_a_while_is_waited_for() -> None:
    target, draft = slow_workers()
    async with serving(target, draft) as served, load(served):
        for proxy in (target.proxy, draft.proxy):
            proxy.refuse(True)
            proxy.cut()
            await served.until(lambda _, proxy=proxy: proxy.refused > 1)
            proxy.refuse(False)
        await served.until_ready()


async def test_a_slow_network_costs_time_only() -> None:
    target, draft = slow_workers()
    async with serving(target, draft) as served, load(served):
        target.proxy.delay(0.02)
        draft.proxy.delay(0.01)
        await served.until(lambda info: info.counters.rounds > 30)


async def test_a_proxy_forwards_what_it_is_sent_in_its_order() -> None:
    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(1000):
            writer.write(data)
        writer.close()

    payload = random.Random(0).randbytes(300_000)
    proxy = CuttingProxy()
    async with await asyncio.start_server(echo, "127.0.0.1", 0) as server, asyncio.timeout(SOME_SECONDS):
        host, port = server.sockets[0].getsockname()
        address = await proxy.start(f"{host}:{port}")
        proxy_host, _, proxy_port = address.rpartition(":")
        reader, writer = await asyncio.open_connection(proxy_host, int(proxy_port))
        proxy.delay(0.01)
        writer.write(payload)
        assert await reader.readexactly(len(payload)) == payload
        assert (proxy.accepted, proxy.connections, proxy.bytes_forwarded) == (1, 1, 2 * len(payload))
        proxy.cut()
        with pytest.raises(ConnectionResetError):
            await reader.read()
        assert (proxy.cuts, proxy.connections_cut, proxy.connections) == (1, 1, 0)
        writer.close()
        await proxy.stop()
        with pytest.raises(ConnectionRefusedError):
            await asyncio.open_connection(proxy_host, int(proxy_port))
