"""The sequences that a worker has seen, and the releases that it has not confirmed."""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Iterator
from contextlib import contextmanager

# More pending releases become one release of all sequences. The worker then rebuilds the caches of running sequences.
MAX_PENDING = 2**16


class Releases:
    """Keeps sequence ids until the worker confirms their release."""

    def __init__(self, send: Callable[[list[int] | None], Awaitable[bool]]) -> None:
        """`send`: sends a release (None: of all sequences), and returns whether the worker confirmed it."""
        self._send = send
        self._seen: set[int] = set()
        self._in_rounds: Counter[int] = Counter()
        """Rounds in flight of each sequence."""
        self._pending: dict[int, object] = {}
        """Sequences to release, each with a mark of its last release."""
        self._frees_all = False
        self._sending: asyncio.Task[None] | None = None
        self._num_sends = 0
        """Unanswered calls of `send`."""

    @property
    def are_due(self) -> bool:
        """Whether releases are pending and not being sent. A second release might meet a sequence that is back."""
        return self._are_pending and not self._num_sends and not self.are_being_sent

    @property
    def are_being_sent(self) -> bool:
        """Whether `send_soon` is still running."""
        return self._sending is not None and not self._sending.done()

    @property
    def _are_pending(self) -> bool:
        return bool(self._pending) or self._frees_all

    def see(self, sequence_ids: Iterable[int]) -> None:
        """Record sequences that are sent to the worker. Others need no release."""
        seen = set(sequence_ids)
        self._seen |= seen
        for sequence_id in self._pending.keys() & seen:  # back: it begins again with an empty cache
            del self._pending[sequence_id]

    @contextmanager
    def in_round(self, sequence_ids: Iterable[int]) -> Iterator[None]:
        """Record the sequences of a round, and that it is in flight."""
        ids = list(sequence_ids)
        self.see(ids)
        self._in_rounds.update(ids)
        try:
            yield
        finally:
            self._in_rounds -= Counter(ids)

    def add(self, sequence_ids: Iterable[int]) -> None:
        released = self._seen.intersection(sequence_ids)
        # The release may overtake a round in flight, which takes the slot again. It needs another release then.
        self._seen -= released - self._in_rounds.keys()
        self._pending |= dict.fromkeys(released, object())
        if len(self._pending) > MAX_PENDING:
            self._pending.clear()
            self._frees_all = True

    def forget(self) -> None:
        """Forget all sequences. The worker at this link need not free them."""
        self._seen.clear()
        self._pending.clear()
        self._frees_all = False

    async def send(self) -> bool:
        """Send all pending releases. Return False if the worker cannot serve them now."""
        released, frees_all = dict(self._pending), self._frees_all
        if not (released or frees_all):
            return True
        self._num_sends += 1
        try:
            if not await self._send(None if frees_all else sorted(released)):
                return False
        finally:
            self._num_sends -= 1
        for sequence_id, mark in released.items():
            if self._pending.get(sequence_id) is mark:  # otherwise it was released again meanwhile
                del self._pending[sequence_id]
        self._frees_all &= not frees_all
        return True

    def send_soon(self) -> None:
        """Send all pending releases in the background, including those added meanwhile, until a send fails."""
        if not self.are_being_sent:
            self._sending = asyncio.create_task(self._send_all())

    async def _send_all(self) -> None:
        while self._are_pending and await self.send():
            pass

    def cancel(self) -> None:
        if self._sending is not None:
            self._sending.cancel()
