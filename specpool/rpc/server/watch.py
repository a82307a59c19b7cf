"""Checks the connections of this process regularly, and closes those that their guard ends.

gRPC has no limits on connections that send nothing, or nothing but calls that are refused. It notices that a connection
is shut down as if the client had closed it.
"""

import asyncio
import logging
import socket
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass

from specpool.rpc.server.guard import Connection, ConnectionGuard
from specpool.rpc.server.sockets import (
    Endpoint,
    borrowed,
    cut,
    descriptors,
    ends,
    inode_of,
    listening,
    received,
    stall,
)

log = logging.getLogger(__name__)

CALM_SECONDS, CROWDED_SECONDS = 0.5, 0.05
# Checks take at most this share of the time, and more if connections must end at once or fill the room.
MAX_SHARE, MAX_URGENT_SHARE = 0.05, 0.5
# Descriptors to check before other tasks get a turn.
AT_ONCE = 64
MIN_PAUSE_SECONDS = 0.005
LOG_SECONDS = 60.0
# A flooding connection is stalled for this long before it is closed: otherwise its client connects again at once.
STALL_SECONDS, MAX_STALLED = 2.0, 256
ANY_HOST = ("0.0.0.0", "::")


@dataclass(slots=True)
class _Known:
    """A connection that was accepted earlier."""

    inode: int
    guard: ConnectionGuard
    remote: Endpoint


class ConnectionWatch:
    """Watches the listening ports of a process."""

    def __init__(self, guards: dict[int, ConnectionGuard]) -> None:
        """`guards`: by port. Their sockets must listen already."""
        self._guards = guards
        self._listening = set(_listening())
        self._known: dict[int, _Known] = {}
        """Accepted connections by descriptor."""
        self._others: dict[int, int] = {}
        """Inodes of other sockets by descriptor."""
        self._wanted = asyncio.Event()
        for guard in guards.values():
            guard.wanted = self._wanted
        self._busy = self._rested = 0.0
        """Seconds that the last check took from other tasks, and that it left to them."""
        self._weighed_at = -CALM_SECONDS
        """When the received bytes were last read."""
        self._logged_at = -LOG_SECONDS
        self._task = asyncio.create_task(self._run())

    async def close(self) -> None:
        self._task.cancel()
        await asyncio.wait([self._task])

    async def _run(self) -> None:
        while True:
            try:
                await self._look()
            except Exception:  # connections without a limit are better than no server
                log.exception("looking at the connections failed")
            self._log()
            is_full = any(guard.is_full for guard in self._guards.values())
            await asyncio.sleep(MIN_PAUSE_SECONDS if is_full else max(MIN_PAUSE_SECONDS, self._busy / MAX_URGENT_SHARE))
            is_crowded = any(guard.is_crowded for guard in self._guards.values())
            pause = CROWDED_SECONDS if is_crowded else max(CALM_SECONDS, self._busy / MAX_SHARE)
            with suppress(TimeoutError):
                async with asyncio.timeout(0 if is_full else pause):
                    await self._wanted.wait()
            self._wanted.clear()

    async def _look(self) -> None:
        looked_at, known = time.monotonic(), dict[int, _Known]()
        is_weighed = looked_at >= self._weighed_at + CALM_SECONDS
        self._weighed_at, self._rested = looked_at if is_weighed else self._weighed_at, 0.0
        async for descriptor in self._in_turns(descriptors()):
            if (found := self._identified(descriptor)) is not None:
                known[descriptor] = found
                self._note(descriptor, found, is_weighed)
        self._known = known
        for guard in self._guards.values():
            guard.judge(looked_at)
        stalled = 0
        async for descriptor in self._in_turns(known):
            connection = known[descriptor].guard.connections.get(known[descriptor].remote)
            if connection is not None and connection.ending:
                may_stall = connection.is_flood and stalled < MAX_STALLED
                stalled += self._end(descriptor, known[descriptor], connection, may_stall)
        self._busy = time.monotonic() - looked_at - self._rested

    async def _in_turns(self, descriptors: Iterable[int]) -> AsyncIterator[int]:
        """Yield descriptors. Other tasks have turns in between."""
        for number, descriptor in enumerate(descriptors, 1):
            if number % AT_ONCE == 0:
                began = time.monotonic()
                await asyncio.sleep(0)
                self._rested += time.monotonic() - began
            yield descriptor

    def _identified(self, descriptor: int) -> _Known | None:
        inode, known = inode_of(descriptor), self._known.get(descriptor)
        if inode is None:
            return None
        if inode and known is not None and known.inode == inode:
            return known
        if inode and self._others.get(descriptor) == inode:
            return None
        with borrowed(descriptor) as each:
            if each is None:  # closed meanwhile, or no descriptor is left for the copy
                return None
            found = self._accepted(each, inode)
        if found is None:
            self._others[descriptor] = inode
        return found

    def _accepted(self, each: socket.socket, inode: int) -> _Known | None:
        both = ends(each)
        if both is None:
            return None
        (host, port), remote = both
        # An outgoing connection may have the number of a listening port too, but not at the same address.
        is_ours = any((name, port) in self._listening for name in (host, *ANY_HOST))
        return _Known(inode, self._guards[port], remote) if port in self._guards and is_ours else None

    def _note(self, descriptor: int, found: _Known, is_weighed: bool) -> None:
        connection = found.guard.connection(found.remote)
        connection.seen_at = time.monotonic()
        if is_weighed and connection.is_stranger:
            with borrowed(descriptor) as each:
                connection.received = received(each) if each is not None else 0

    def _end(self, descriptor: int, known: _Known, connection: Connection, may_stall: bool) -> bool:
        """Stall or close a connection. Return whether it is stalled."""
        now = time.monotonic()
        if may_stall and connection.stalled_at and now < connection.stalled_at + STALL_SECONDS:
            return True
        with borrowed(descriptor) as each:
            if each is not None and (both := ends(each)) is not None and both[1] == known.remote:
                if may_stall and not connection.stalled_at and stall(each):
                    connection.stalled_at = now
                    return True
                cut(each)
        return False

    def _log(self) -> None:
        """Log at most one line a minute, however many connections end."""
        if time.monotonic() < self._logged_at + LOG_SECONDS:
            return
        ended = sum((guard.take_ended() for guard in self._guards.values()), Counter[str]())
        if ended:
            reasons = ", ".join(f"{count} {reason}" for reason, count in ended.most_common())
            log.warning("closed %d connections: %s", ended.total(), reasons)
            self._logged_at = time.monotonic()


def _listening() -> Iterator[Endpoint]:
    """Yield the local ends of all listening sockets of this process."""
    for descriptor in descriptors():
        with borrowed(descriptor) as each:
            if each is not None and (local := listening(each)) is not None:
                yield local
