"""A query whose result is reused for a short time."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

R = TypeVar("R")

RECENT_SECONDS = 0.1
"""Time for which a result is reused."""


class Recent(Generic[R]):
    """A query that concurrent callers share. Later callers reuse its result for `RECENT_SECONDS`."""

    def __init__(self, query: Callable[[], Awaitable[R]], is_reused: bool = True) -> None:
        """`is_reused`: whether later callers reuse the result."""
        self._query, self._is_reused = query, is_reused
        self._querying: asyncio.Future[R] | None = None
        self._ends = 0.0

    async def get(self) -> R:
        """Return the result. Raises the error of the query."""
        if self._querying is None or (self._querying.done() and time.monotonic() >= self._ends):
            self._querying = asyncio.ensure_future(self._ask())
        return await asyncio.shield(self._querying)  # other callers may need it

    async def _ask(self) -> R:
        try:
            return await self._query()
        finally:
            self._ends = time.monotonic() + (RECENT_SECONDS if self._is_reused else 0.0)
