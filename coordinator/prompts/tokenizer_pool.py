"""The few threads on which prompts are tokenized, so that large prompts delay neither small ones nor the event loop."""

import asyncio
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, contextmanager
from typing import TypeVar

from specpool.protocol.errors import QueueFullError

THREADS = 2
# Larger prompts use only one of the threads.
LARGE_BYTES = 16_384
# Large prompts that may wait: each keeps its text in memory.
MOST_LARGE_WAITING = 16
# Delay after which a refused client is told to try again.
RETRY_SECONDS = 0.5

Result = TypeVar("Result")
Check = Callable[[], None]


class AbandonedError(Exception):
    """Nobody waits for the result any more."""


class TokenizerPool:
    """Runs work on prompts: small ones in their order of arrival, and large ones in a queue of their own."""

    def __init__(self, most_waiting: int) -> None:
        """`most_waiting`: prompts that may wait for a thread; further ones are refused."""
        self._most_waiting = most_waiting
        self._waiting = self._large_waiting = 0
        self._threads = ThreadPoolExecutor(THREADS, "tokenize")
        self._free, self._free_for_large = asyncio.Semaphore(THREADS), asyncio.Semaphore(1)

    async def run(self, size: int, work: Callable[[Check], Result], before: Check = lambda: None) -> Result:
        """The result of `work` on a prompt of `size` bytes. QueueFullError if too many wait.

        `before` is called when a thread is free, and may raise. `work` gets a function to call every now and then; this
        function raises AbandonedError once the caller has left.
        """
        is_large = size > LARGE_BYTES
        async with AsyncExitStack() as slot:
            with self._waits(is_large):
                for semaphore in (self._free_for_large, self._free) if is_large else (self._free,):
                    await slot.enter_async_context(semaphore)
            before()
            return await self._on_thread(work, slot.pop_all())

    @contextmanager
    def _waits(self, is_large: bool) -> Iterator[None]:
        if self._waiting >= self._most_waiting or (is_large and self._large_waiting >= MOST_LARGE_WAITING):
            raise QueueFullError(f"too many prompts wait to be tokenized ({self._waiting})", RETRY_SECONDS)
        self._waiting += 1
        self._large_waiting += is_large
        try:
            yield
        finally:
            self._waiting -= 1
            self._large_waiting -= is_large

    async def _on_thread(self, work: Callable[[Check], Result], slot: AsyncExitStack) -> Result:
        has_left = False

        def check() -> None:
            if has_left:
                raise AbandonedError

        async def to_the_end() -> Result:
            async with slot:  # work that nobody waits for goes on until its next check, and keeps its thread until then
                return await asyncio.get_running_loop().run_in_executor(self._threads, work, check)

        try:
            return await asyncio.shield(asyncio.create_task(to_the_end()))
        finally:
            has_left = True
