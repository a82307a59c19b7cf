"""The one thread that runs a worker's model: serial by construction, and never waited for by the event loop."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")


class ModelThread:
    """A thread that runs functions one after the other, in the order of their calls."""

    def __init__(self) -> None:
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="model")

    async def run(self, function: Callable[..., T], *arguments: object) -> T:
        """The function's result. A caller that is cancelled before its turn leaves no work behind."""
        return await asyncio.get_running_loop().run_in_executor(self._executor, function, *arguments)

    def close(self) -> None:
        """Waits for the running function to end, and drops those that have not started."""
        self._executor.shutdown(wait=True, cancel_futures=True)
