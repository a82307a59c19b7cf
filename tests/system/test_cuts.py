"""Cut, silent, refused or slow links to the workers fail no request and change no token."""

import asyncio
import random
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any
from unittest import mock

import pytest
from lab.load import Load, fake_cases, sender
from lab.proxy import CuttingProxy
from serving import Serving, make_request, random_request, serving

from specpool.testing import FakeDraft, FakeOwnDraft, FakeTarget, FakeWorker
from specpool.v1 import generation_pb2 as pb

CUTS = 30
"""Cuts of each kind; `make soak SOAK="--cuts 3000"` makes more of them, to real workers."""
CONCURRENCY = 8
MAX_PAUSE_SECONDS = 0.04
ABANDON_SECONDS = 10.0
"""Time to abandon a silent connection; a round itself may take a minute."""


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
    """A draft worker behind a proxy."""


def slow_workers() -> tuple[TargetBehind, DraftBehind]:
    """Workers whose passes take long enough that cuts hit rounds."""
    target = TargetBehind(pass_seconds=lambda rows: 0.002)
    return target, DraftBehind(target, pass_seconds=lambda rows: 0.0005)


def requests() -> Iterator[pb.GenerateRequest]:
    """An endless series of random requests."""
    rng = random.Random(0)
    while True:
        yield random_request(rng)


@asynccontextmanager
async def under_load(served: Serving) -> AsyncIterator[None]:
    """Keep requests in flight. At the end, every request has been answered once, correctly, and all slots are free."""
    load = Load(sender(served.stub), fake_cases(served.target, requests()), CONCURRENCY)
    running = asyncio.create_task(load.run())
    try:
        yield
    finally:
        load.stop()
        await running
    assert load.tally.faults == []
    info = await served.until_idle()
    assert sum(info.counters.finished.values()) == load.tally.outcomes["answered"] == load.tally.outcomes.total()


@pytest.mark.parametrize(
    "links", ["both", pytest.param("target", marks=pytest.mark.slow), pytest.param("draft", marks=pytest.mark.slow)]
)
async def test_cuts_lose_and_repeat_nothing(links: str) -> None:
    target, draft = slow_workers()
    proxies = {"target": [target.proxy], "draft": [draft.proxy], "both": [target.proxy, draft.proxy]}[links]
    rng = random.Random(1)
    async with serving(target, draft) as served, under_load(served):
        for _ in range(CUTS):
            await asyncio.sleep(rng.uniform(0, MAX_PAUSE_SECONDS))
            rng.choice(proxies).cut()
    # After each cut the draft link backs off for longer, without a connection.
    assert sum(proxy.connections_cut for proxy in proxies) > (1 if links == "draft" else CUTS / 4)


async def test_cuts_of_targets_that_carry_a_draft_lose_and_repeat_nothing() -> None:
    target = TargetBehind(pass_seconds=lambda rows: 0.002, draft=FakeOwnDraft(pass_seconds=lambda rows: 0.0005))
    rng = random.Random(1)
    async with serving(target, with_draft=False) as served, under_load(served):
        for _ in range(CUTS):
            await asyncio.sleep(rng.uniform(0, MAX_PAUSE_SECONDS))
            target.proxy.cut()
        await served.until(lambda info: info.counters.drafts["model"].accepted_draft_tokens)
    assert target.proxy.connections_cut > CUTS / 4


@pytest.mark.parametrize("link", ["target", pytest.param("draft", marks=pytest.mark.slow)])
async def test_silent_connections_are_abandoned(link: str) -> None:
    target, draft = slow_workers()
    proxy = {"target": target, "draft": draft}[link].proxy
    with mock.patch("coordinator.workers.link.PROBE_TIMEOUT_SECONDS", 1.0):
        await abandon(target, draft, proxy)


async def abandon(target: TargetBehind, draft: DraftBehind, proxy: CuttingProxy) -> None:
    """Swallows the bytes of a link during generation; the coordinator must reconnect and lose nothing."""
    async with serving(target, draft, draft_timeout_seconds=0.5) as served:
        running = [asyncio.create_task(served.expect(make_request([i], 200))) for i in range(4)]
        await served.until(lambda info: info.counters.completion_tokens > 20)
        before = proxy.accepted
        proxy.swallow()
        async with asyncio.timeout(ABANDON_SECONDS):
            await asyncio.gather(*running)
            await served.until(lambda _: proxy.accepted > before)
        await served.until_ready()
        assert (await served.expect(make_request())).speculative_decoding.num_draft_tokens > 0


@pytest.mark.parametrize("link", ["target", pytest.param("draft", marks=pytest.mark.slow)])
async def test_temporary_silence_costs_only_time(link: str) -> None:
    target, draft = slow_workers()
    proxy = {"target": target, "draft": draft}[link].proxy
    async with serving(target, draft, draft_timeout_seconds=0.2) as served, under_load(served):
        for _ in range(3):
            await asyncio.sleep(0.2)
            proxy.black_hole(True)
            await asyncio.sleep(0.3)
            proxy.black_hole(False)
    assert proxy.bytes_swallowed > 0


@pytest.mark.slow
async def test_refused_and_slow_connections_cost_only_time() -> None:
    target, draft = slow_workers()
    async with serving(target, draft) as served, under_load(served):
        for proxy in (target.proxy, draft.proxy):
            proxy.refuse(True)
            proxy.cut()
            await served.until(lambda _, proxy=proxy: proxy.refused > 1)
            proxy.refuse(False)
        await served.until_ready()
        target.proxy.delay(0.02)
        draft.proxy.delay(0.01)
        rounds = (await served.info()).counters.rounds
        await served.until(lambda info: info.counters.rounds > rounds + 30)
