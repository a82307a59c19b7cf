"""The one thread that runs a worker's model: serial by construction, and the event loop never waits for it."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")


class ModelThread:
    """Runs functions one after the other, in the order of their calls."""

    def __init__(self) -> None:
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="model")

    async def run(self, function: Callable[..., T], *arguments: object) -> T:
        """The function's result. A caller that is cancelled before its turn leaves no work behind."""
        return await asyncio.get_running_loop().run_in_executor(self._executor, function, *arguments)

    def close(self) -> None:
        """Lets the running function end and drops the rest."""
        self._executor.shutdown(wait=True, cancel_futures=True)
