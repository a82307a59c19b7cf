"""Sequences that a worker is yet to be told to free."""

import asyncio
from collections.abc import Awaitable, Callable, Iterable


class Releases:
    """Sequence ids that are to be freed, until the worker has confirmed it."""

    def __init__(self, send: Callable[[list[int]], Awaitable[bool]]) -> None:
        """`send` tells the worker, and returns whether the worker has confirmed."""
        self._send = send
        self._waiting: set[int] = set()
        self._sending: asyncio.Task[None] | None = None

    @property
    def are_due(self) -> bool:
        """Whether there is something to send and it is not being sent."""
        return bool(self._waiting) and not self.are_being_sent

    @property
    def are_being_sent(self) -> bool:
        """Whether the worker has yet to answer `send_soon`."""
        return self._sending is not None and not self._sending.done()

    def add(self, sequence_ids: Iterable[int]) -> None:
        """Notes sequences that are to be freed."""
        self._waiting.update(sequence_ids)

    async def send(self) -> bool:
        """Sends all that waits. False if the worker cannot do it now."""
        released = sorted(self._waiting)
        if not await self._send(released):
            return False
        self._waiting.difference_update(released)
        return True

    def send_soon(self) -> None:
        """Sends all that waits, in the background, including what is added meanwhile, as long as the worker can take
        it."""
        if not self.are_being_sent:
            self._sending = asyncio.create_task(self._send_all())

    async def _send_all(self) -> None:
        while self._waiting and await self.send():
            pass

    def cancel(self) -> None:
        """Ends sending in the background."""
        if self._sending is not None:
            self._sending.cancel()
