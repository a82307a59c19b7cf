"""The tokenizer pool: order, limits, errors and abandoned work."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest
from secure_service import until
from serving import PATIENCE_SECONDS

from coordinator.prompts.tokenizer_pool import LARGE_BYTES, MAX_LARGE_WAITING, AbandonedError, TokenizerPool
from specpool.protocol.errors import QueueFullError

SMALL, LARGE = 10, LARGE_BYTES + 1


class Work:
    """Runs until `may_end` is set, or with `checks` until it is abandoned."""

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


async def run_short(pool: TokenizerPool, size: int) -> str:
    async with asyncio.timeout(PATIENCE_SECONDS):
        return await pool.run(size, lambda check: "short")


@asynccontextmanager
async def busy(pool: TokenizerPool, *sizes: int) -> AsyncIterator[None]:
    """Occupy threads of the pool."""
    works = [Work() for _ in sizes]
    running = [asyncio.create_task(pool.run(size, work)) for size, work in zip(sizes, works, strict=True)]
    for work in works:
        await until(work.began.is_set)
    yield
    for work in works:
        work.may_end.set()
    assert await asyncio.gather(*running) == ["done"] * len(sizes)


async def test_small_prompts_overtake_large_ones() -> None:
    pool, large = TokenizerPool(100), [Work() for _ in range(4)]
    running = [asyncio.create_task(pool.run(LARGE, work)) for work in large]
    await until(large[0].began.is_set)
    for _ in range(20):
        assert await run_short(pool, SMALL) == "short"
    assert [work.began.is_set() for work in large] == [True, False, False, False]
    for work in large:
        work.may_end.set()
    assert await asyncio.gather(*running) == ["done"] * 4


async def test_cancelled_work_frees_its_thread_at_its_next_check() -> None:
    pool, work = TokenizerPool(100), Work()
    running = asyncio.create_task(pool.run(LARGE, work))
    await until(work.began.is_set)
    running.cancel()
    await until(work.abandoned.is_set)
    assert await run_short(pool, LARGE) == "short"


async def test_abandoned_work_keeps_its_thread_until_it_ends() -> None:
    pool, first, second = TokenizerPool(100), Work(checks=False), Work()
    running = asyncio.create_task(pool.run(LARGE, first))
    await until(first.began.is_set)
    running.cancel()
    waiting = asyncio.create_task(pool.run(LARGE, second))
    assert await run_short(pool, SMALL) == "short"
    assert not second.began.is_set()
    first.may_end.set()
    second.may_end.set()
    assert await waiting == "done"


@pytest.mark.parametrize("size", [SMALL, LARGE])
async def test_prompts_cancelled_while_waiting_never_run(size: int) -> None:
    pool, never = TokenizerPool(100), Work()
    async with busy(pool, LARGE, SMALL):
        waiting = asyncio.create_task(pool.run(size, never))
        await asyncio.sleep(0)
        waiting.cancel()
    assert await run_short(pool, LARGE) == await run_short(pool, SMALL) == "short"
    assert not never.began.is_set()


@pytest.mark.parametrize(
    ("max_waiting", "occupied", "size", "fit"),
    [(3, (SMALL, SMALL), SMALL, 3), (100, (LARGE,), LARGE, MAX_LARGE_WAITING)],
    ids=["small", "large"],
)
async def test_waiting_prompts_are_limited(max_waiting: int, occupied: tuple[int, ...], size: int, fit: int) -> None:
    pool = TokenizerPool(max_waiting)
    async with busy(pool, *occupied):
        waiting = [asyncio.create_task(run_short(pool, size)) for _ in range(fit)]
        await asyncio.sleep(0)
        with pytest.raises(QueueFullError, match=rf"too many prompts are waiting to be tokenized \({fit}\)") as caught:
            await run_short(pool, size)
        assert caught.value.retry_seconds > 0
    assert await asyncio.gather(*waiting) == ["short"] * fit


@pytest.mark.parametrize("size", [SMALL, LARGE])
async def test_errors_reach_the_caller_and_free_the_thread(size: int) -> None:
    pool = TokenizerPool(100)

    def fail(*_: object) -> str:
        raise ValueError("wrong")

    for _ in range(5):
        with pytest.raises(ValueError, match="wrong"):
            await pool.run(size, fail)
        with pytest.raises(ValueError, match="wrong"):
            await pool.run(size, lambda check: "never", before=fail)
    assert await run_short(pool, size) == "short"
