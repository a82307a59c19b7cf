"""Who waits for whom when prompts are tokenized."""

import asyncio
import threading
from collections.abc import Callable

import pytest

from coordinator.prompts.tokenizer_pool import LARGE_BYTES, MOST_LARGE_WAITING, AbandonedError, TokenizerPool
from specpool.protocol.errors import QueueFullError

PATIENCE_SECONDS = 20
SMALL, LARGE = 10, LARGE_BYTES + 1


class Work:
    """Work that lasts until it is told to end, or until the caller has left and `checks` is set."""

    def __init__(self, checks: bool = True) -> None:
        self.began, self.may_end, self.abandoned = threading.Event(), threading.Event(), threading.Event()
        self._checks = checks

    def __call__(self, check: Callable[[], None]) -> str:
        self.began.set()
        while not self.may_end.wait(0.01):
            try:
                if self._checks:
                    check()
            except AbandonedError:
                self.abandoned.set()
                raise
        return "done"

    async def until_begun(self) -> None:
        await until(self.began.is_set)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE_SECONDS):
        while not condition():  # noqa: ASYNC110 - it becomes true on another thread
            await asyncio.sleep(0.005)


async def at_once(slots: TokenizerPool, size: int) -> str:
    async with asyncio.timeout(PATIENCE_SECONDS):
        return await slots.run(size, lambda check: "small")


async def test_small_prompts_do_not_wait_for_large_ones() -> None:
    slots, large = TokenizerPool(100), [Work() for _ in range(4)]
    running = [asyncio.create_task(slots.run(LARGE, work)) for work in large]
    await large[0].until_begun()
    for _ in range(20):
        assert await at_once(slots, SMALL) == "small"
    assert [work.began.is_set() for work in large] == [True, False, False, False]
    for work in large:
        work.may_end.set()
    assert await asyncio.gather(*running) == ["done"] * 4


async def test_a_client_that_leaves_frees_its_thread_as_soon_as_the_work_looks() -> None:
    slots, work = TokenizerPool(100), Work()
    running = asyncio.create_task(slots.run(LARGE, work))
    await work.until_begun()
    running.cancel()
    await until(work.abandoned.is_set)
    assert await at_once(slots, LARGE) == "small"


async def test_work_that_nobody_waits_for_keeps_its_thread_until_it_ends() -> None:
    slots, first, second = TokenizerPool(100), Work(checks=False), Work()
    running = asyncio.create_task(slots.run(LARGE, first))
    await first.until_begun()
    running.cancel()
    waiting = asyncio.create_task(slots.run(LARGE, second))
    assert await at_once(slots, SMALL) == "small"
    assert not second.began.is_set()
    first.may_end.set()
    second.may_end.set()
    assert await waiting == "done"


@pytest.mark.parametrize("size", [SMALL, LARGE])
async def test_a_client_that_leaves_while_it_waits_costs_nothing(size: int) -> None:
    slots, busy, never = TokenizerPool(100), [Work(), Work()], Work()
    running = [asyncio.create_task(slots.run(each, work)) for each, work in zip((LARGE, SMALL), busy, strict=True)]
    for work in busy:
        await work.until_begun()
    waiting = asyncio.create_task(slots.run(size, never))
    await asyncio.sleep(0)
    waiting.cancel()
    for work in busy:
        work.may_end.set()
    await asyncio.gather(*running)
    assert await at_once(slots, LARGE) == await at_once(slots, SMALL) == "small"
    assert not never.began.is_set()


async def test_no_more_than_a_number_wait() -> None:
    slots, busy = TokenizerPool(most_waiting=3), [Work(), Work()]
    running = [asyncio.create_task(slots.run(SMALL, work)) for work in busy]
    for work in busy:
        await work.until_begun()
    waiting = [asyncio.create_task(at_once(slots, SMALL)) for _ in range(3)]
    await asyncio.sleep(0)
    with pytest.raises(QueueFullError, match=r"too many prompts wait to be tokenized \(3\)") as caught:
        await at_once(slots, SMALL)
    assert caught.value.retry_seconds > 0
    for work in busy:
        work.may_end.set()
    assert await asyncio.gather(*waiting) == ["small"] * 3
    await asyncio.gather(*running)


async def test_fewer_large_ones_wait() -> None:
    slots, busy = TokenizerPool(100), Work()
    running = asyncio.create_task(slots.run(LARGE, busy))
    await busy.until_begun()
    waiting = [asyncio.create_task(at_once(slots, LARGE)) for _ in range(MOST_LARGE_WAITING)]
    await asyncio.sleep(0)
    with pytest.raises(QueueFullError):
        await at_once(slots, LARGE)
    assert await at_once(slots, SMALL) == "small"
    busy.may_end.set()
    assert await asyncio.gather(*waiting) == ["small"] * MOST_LARGE_WAITING
    await running


@pytest.mark.parametrize("size", [SMALL, LARGE])
async def test_errors_reach_the_caller_and_free_the_thread(size: int) -> None:
    slots = TokenizerPool(100)

    def fail(*_: object) -> str:
        raise ValueError("wrong")

    for _ in range(5):
        with pytest.raises(ValueError, match="wrong"):
            await slots.run(size, fail)
        with pytest.raises(ValueError, match="wrong"):
            await slots.run(size, lambda check: "never", before=fail)
    assert await at_once(slots, size) == "small"
