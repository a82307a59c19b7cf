"""The threads that tokenize prompts. Large prompts delay neither small ones nor the event loop."""

import asyncio
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, contextmanager
from typing import TypeVar

from specpool.protocol.errors import QueueFullError

THREADS = 2
# Larger prompts use only one of the threads.
LARGE_BYTES = 16_384
# Maximum number of waiting large prompts. Each keeps its text in memory.
MAX_LARGE_WAITING = 16
# Retry delay for refused clients.
RETRY_SECONDS = 0.5

Result = TypeVar("Result")
Check = Callable[[], None]


class AbandonedError(Exception):
    """The caller no longer waits for the result."""


class TokenizerPool:
    """Runs work on prompts in order of arrival. Large prompts have a queue of their own."""

    def __init__(self, max_waiting: int) -> None:
        """`max_waiting`: maximum number of waiting prompts; others are refused."""
        self._max_waiting = max_waiting
        self._waiting = self._large_waiting = 0
        self._threads = ThreadPoolExecutor(THREADS, "tokenize")
        self._free, self._free_for_large = asyncio.Semaphore(THREADS), asyncio.Semaphore(1)

    async def run(self, size: int, work: Callable[[Check], Result], before: Check = lambda: None) -> Result:
        """Run `work` on a thread, for a prompt of `size` bytes. Raises QueueFullError.

        `before`: runs when a thread is free, and may raise. `work`: gets a function to call periodically, which raises
        AbandonedError once the caller is cancelled.
        """
        is_large = size > LARGE_BYTES
        async with AsyncExitStack() as slot:
            with self._queued(is_large):
                for semaphore in (self._free_for_large, self._free) if is_large else (self._free,):
                    await slot.enter_async_context(semaphore)
            before()
            return await self._on_thread(work, slot.pop_all())

    @contextmanager
    def _queued(self, is_large: bool) -> Iterator[None]:
        if self._waiting >= self._max_waiting or (is_large and self._large_waiting >= MAX_LARGE_WAITING):
            raise QueueFullError(f"too many prompts are waiting to be tokenized ({self._waiting})", RETRY_SECONDS)
        self._waiting += 1
        self._large_waiting += is_large
        try:
            yield
        finally:
            self._waiting -= 1
            self._large_waiting -= is_large

    async def _on_thread(self, work: Callable[[Check], Result], slot: AsyncExitStack) -> Result:
        is_abandoned = False

        def check() -> None:
            if is_abandoned:
                raise AbandonedError

        async def finish() -> Result:
            async with slot:  # abandoned work keeps its thread until its next check
                return await asyncio.get_running_loop().run_in_executor(self._threads, work, check)

        try:
            return await asyncio.shield(asyncio.create_task(finish()))
        finally:
            is_abandoned = True
