"""The coordinator shows how far its workers have loaded, and why one failed."""

import asyncio
from collections.abc import AsyncIterator

import pytest
from loading_workers import LoadingDraft, LoadingTarget
from serving import Serving, make_request, serving

from specpool.protocol.responses import MAX_SMALL_BYTES

NOT_SERVING, SERVING = 2, 1


@pytest.fixture
async def target() -> LoadingTarget:
    return LoadingTarget()


@pytest.fixture
async def served(target: LoadingTarget) -> AsyncIterator[Serving]:
    """A coordinator whose target worker loads."""
    async with serving(target, with_draft=False, with_target=False) as running:
        await target.start(running.target_address)
        yield running


async def test_phases_of_the_target_are_the_reason_of_its_state(served: Serving, target: LoadingTarget) -> None:
    for phase in ("importing torch", "loading weights"):
        target.report(phase)
        info = await served.until(lambda info, phase=phase: info.target.reason == phase)
        assert info.target.state == "loading"
        assert await served.status() == NOT_SERVING
    await target.loaded()
    await served.until_ready()
    assert await served.status() == SERVING
    await served.expect(make_request())


async def test_a_failed_target_keeps_its_reason_until_it_starts_again(served: Serving, target: LoadingTarget) -> None:
    await served.until(lambda info: info.target.state == "loading")
    await target.fail("the file is damaged")
    info = await served.until(lambda info: info.target.state == "failed")
    assert info.target.reason == "the file is damaged"
    await asyncio.sleep(0.2)  # several probes of the worker, which has exited
    assert (await served.info()).target.reason == "the file is damaged"
    await target.start(served.target_address)
    await served.until(lambda info: info.target.state == "loading")
    await target.loaded()
    await served.until_ready()
    await served.expect(make_request())


async def test_a_long_reason_is_shortened(served: Serving, target: LoadingTarget) -> None:
    await served.until(lambda info: info.target.state == "loading")
    await target.fail("size mismatch" * MAX_SMALL_BYTES)
    info = await served.until(lambda info: info.target.state == "failed")
    assert info.target.reason.startswith("size mismatch")


async def test_a_target_that_is_killed_while_it_loads_is_connecting_again(
    served: Serving, target: LoadingTarget
) -> None:
    await served.until(lambda info: info.target.state == "loading")
    await target.stop()
    info = await served.until(lambda info: info.target.state == "connecting")
    assert "UNAVAILABLE" in info.target.reason
    await target.start(served.target_address)
    await served.until(lambda info: info.target.state == "loading")


async def test_the_draft_shows_its_phases_while_the_target_loads(served: Serving, target: LoadingTarget) -> None:
    draft = LoadingDraft(target)
    async with serving(target, draft, with_target=False) as both:
        draft.report("loading weights")
        info = await both.until(lambda info: info.draft.state == "loading" and info.draft.reason != "starting")
        assert info.draft.reason == "loading weights"
        assert info.target.state == "connecting"
        await draft.loaded()
        await both.until(lambda info: info.draft.reason == "waiting for the target")
