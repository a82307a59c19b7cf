"""Pending releases: sequences that a worker has yet to free."""

import asyncio
from collections.abc import Awaitable, Callable, Iterable


class Releases:
    """Keeps sequence ids until the worker confirms their release."""

    def __init__(self, send: Callable[[list[int]], Awaitable[bool]]) -> None:
        """`send`: sends a release, and returns whether the worker confirmed it."""
        self._send = send
        self._pending: set[int] = set()
        self._sending: asyncio.Task[None] | None = None

    @property
    def are_due(self) -> bool:
        """Whether releases are pending and not being sent."""
        return bool(self._pending) and not self.are_being_sent

    @property
    def are_being_sent(self) -> bool:
        """Whether `send_soon` is still running."""
        return self._sending is not None and not self._sending.done()

    def add(self, sequence_ids: Iterable[int]) -> None:
        self._pending.update(sequence_ids)

    async def send(self) -> bool:
        """Send all pending releases. Return False if the worker cannot serve them now."""
        released = sorted(self._pending)
        if not await self._send(released):
            return False
        self._pending.difference_update(released)
        return True

    def send_soon(self) -> None:
        """Send all pending releases in the background, including those added meanwhile, until a send fails."""
        if not self.are_being_sent:
            self._sending = asyncio.create_task(self._send_all())

    async def _send_all(self) -> None:
        while self._pending and await self.send():
            pass

    def cancel(self) -> None:
        if self._sending is not None:
            self._sending.cancel()
