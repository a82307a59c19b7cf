"""Decides which connections of a server must end: idle and flooding strangers, and those beyond the limits.

A connection belongs to a stranger until one of its calls is authenticated, or accepted where no credentials are needed.
Health checks are open to everyone and do not count. Knows no sockets:
`specpool.rpc.server.watch` finds them.
"""

import asyncio
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from itertools import islice

from specpool.rpc.server.connections import ConnectionLimits
from specpool.rpc.server.sockets import Endpoint, endpoint_of, network_of
from specpool.rpc.token_bucket import TokenBucket

# Time until a stranger's connection must have had an answer. Strangers lose their connections after it first.
FIRST_CALL_SECONDS, GRACE_SECONDS = 10.0, 1.0
# Load balancers check the health of a server for days on one connection.
MAX_STRANGER_BYTES, STRANGER_BYTES_PER_SECOND = 2**20, 2**14
# Calls refused to a network, and calls that a client resets at once: this many in a burst, and this many a second.
REFUSED_BURST, REFUSED_PER_SECOND = 128, 50
RESET_BURST, RESETS_PER_SECOND = 512, 100
RESET_SECONDS = 1.0
"""A call that its client cancels later than this does not count."""
# What a single connection may cause within a second although its network or client is above its rate. Probes make few
# health checks. Connections of clients may be shared, as those of a proxy are.
FREE_CHECKS, FREE_REFUSALS, FREE_RESETS = 4, 256, 32
MAX_BUCKETS = 4096

NO_CALL, CROWD, BYTES, REFUSED, RESETS, SURPLUS = (
    "made no call", "were too many without a call", "sent too much without a call", "were refused too often",
    "reset too many calls", "were above max_connections",
)  # fmt: skip


@dataclass(eq=False, slots=True)
class Connection:
    """A connection, since it was noticed."""

    network: str
    opened_at: float
    peer: str = ""
    """gRPC's name of the client's end, once it has made a call."""
    client: str = ""
    """Name of the client, empty for strangers."""
    has_answer: bool = False
    """Whether a health check was answered."""
    calls: int = 0
    """Calls in progress."""
    idle_since: float = 0.0
    received: int = 0
    offences: int = 0
    offended_at: float = 0.0
    seen_at: float = 0.0
    ending: str = ""
    """Why the connection must end, empty if it need not."""
    stalled_at: float = 0.0
    """When what it receives began to be dropped; 0 before."""

    @property
    def is_stranger(self) -> bool:
        return not self.client

    @property
    def is_flood(self) -> bool:
        """Whether it ends because it caused too much work. Its client would connect again at once."""
        return self.ending in (BYTES, REFUSED, RESETS)


class ConnectionGuard:
    """The connections of one server. All methods run on its event loop."""

    def __init__(self, limits: ConnectionLimits, clock: Callable[[], float] = time.monotonic) -> None:
        self.limits = limits
        self.connections: dict[Endpoint, Connection] = {}
        self.wanted = asyncio.Event()
        """Set when a connection must end at once."""
        self._ended: Counter[str] = Counter()
        self._by_peer: dict[str, Connection] = {}
        self._buckets: dict[tuple[str, str], TokenBucket] = {}
        self._clock = clock

    # --- Calls

    @contextmanager
    def call(self, connection: Connection) -> Iterator[Callable[[], None]]:
        """Context manager of a call in progress. Yields a function to call if the client resets it."""
        began = self._clock()

        def reset() -> None:
            if self._clock() - began < RESET_SECONDS:
                who = connection.client or connection.network
                self._charge(connection, RESETS, who, RESET_BURST, RESETS_PER_SECOND, FREE_RESETS)

        connection.calls += 1
        try:
            yield reset
        finally:
            connection.calls -= 1
            connection.idle_since = self._clock()

    def accepted(self, peer: str, client: str, is_health: bool) -> None:
        """Note that a call of this client was accepted. Health checks are open to strangers."""
        connection = self.connection_of(peer)
        if not is_health:
            connection.client = client
        elif connection.is_stranger:
            connection.has_answer = True
            self._charge(connection, REFUSED, connection.network, REFUSED_BURST, REFUSED_PER_SECOND, FREE_CHECKS)

    def refused(self, peer: str) -> None:
        """Note that a call had no valid credentials."""
        connection = self.connection_of(peer)
        free = 0 if connection.is_stranger else FREE_REFUSALS
        self._charge(connection, REFUSED, connection.network, REFUSED_BURST, REFUSED_PER_SECOND, free)

    def _charge(self, connection: Connection, reason: str, who: str, burst: int, rate: int, free: int) -> None:
        now = self._clock()
        if now - connection.offended_at > 1:
            connection.offences, connection.offended_at = 0, now
        connection.offences += 1
        if len(self._buckets) >= MAX_BUCKETS:
            self._buckets.clear()
        bucket = self._buckets.setdefault((reason, who), TokenBucket(burst, rate, now))
        if not bucket.take(now) and connection.offences > free:
            self._end(connection, reason)
            self.wanted.set()

    # --- Connections

    def connection(self, endpoint: Endpoint) -> Connection:
        """Return the connection from an endpoint, which may be new."""
        if (known := self.connections.get(endpoint)) is not None:
            return known
        now = self._clock()
        new = self.connections[endpoint] = Connection(network_of(endpoint[0]), now, idle_since=now, seen_at=now)
        return new

    def connection_of(self, peer: str) -> Connection:
        """Return the connection of a call, by the name that gRPC gives to its client's end."""
        if (known := self._by_peer.get(peer)) is None:
            endpoint = endpoint_of(peer)
            known = self.connection(endpoint) if endpoint is not None else Connection("", self._clock())
            self._by_peer[peer] = known
            known.peer = peer
        return known

    def judge(self, looked_at: float) -> None:
        """Forget connections that were not seen since, and mark those that must end."""
        gone = [endpoint for endpoint, connection in self.connections.items() if connection.seen_at < looked_at]
        for endpoint in gone:
            connection = self.connections.pop(endpoint)
            self._by_peer.pop(connection.peer, None)
        now = self._clock()
        for connection in self.connections.values():
            if connection.is_stranger:
                age = now - connection.opened_at
                if not connection.has_answer and age > FIRST_CALL_SECONDS:
                    self._end(connection, NO_CALL)
                elif connection.received > MAX_STRANGER_BYTES + age * STRANGER_BYTES_PER_SECOND:
                    self._end(connection, BYTES)
        self._end_strangers(now)
        self._end_surplus()

    def take_ended(self) -> Counter[str]:
        """Return the numbers of connections that had to end since the last time, by reason."""
        ended, self._ended = self._ended, Counter()
        return ended

    @property
    def is_crowded(self) -> bool:
        """Whether strangers take much of their room, so that the next check should be soon."""
        return self._strangers > self.limits.strangers // 2 or len(self.connections) > self.limits.clients

    @property
    def is_full(self) -> bool:
        """Whether so many strangers were found that gRPC may soon refuse newcomers, so the next check is urgent."""
        return self._strangers > self.limits.newcomers // 2

    @property
    def _strangers(self) -> int:
        return sum(connection.is_stranger for connection in self.connections.values())

    def _end_strangers(self, now: float) -> None:
        """End the oldest connections of the networks with most, until the rest are within their limits."""
        crowds = _grouped((each for each in self._open() if each.is_stranger), lambda each: each.network)
        total = sum(map(len, crowds))
        for crowd in crowds:
            crowd.sort(key=lambda each: each.opened_at, reverse=True)  # oldest last
        for crowd in _largest_first(crowds):
            if total <= self.limits.strangers and len(crowd) <= self.limits.strangers_per_network:
                return
            if now - crowd[-1].opened_at > GRACE_SECONDS or total > self.limits.newcomers // 2:
                self._end(crowd.pop(), CROWD)
                total -= 1

    def _end_surplus(self) -> None:
        """End connections of the clients with most: the longest idle first, then the newest."""
        owners = _grouped((each for each in self._open() if not each.is_stranger), lambda each: each.client)
        surplus = sum(map(len, owners)) - self.limits.clients
        if surplus <= 0:
            return
        for owned in owners:
            owned.sort(key=lambda each: (not each.calls, each.opened_at if each.calls else -each.idle_since))
        for owned in islice(_largest_first(owners), surplus):
            self._end(owned.pop(), SURPLUS)

    def _open(self) -> Iterator[Connection]:
        return (connection for connection in self.connections.values() if not connection.ending)

    def _end(self, connection: Connection, reason: str) -> None:
        if not connection.ending:
            connection.ending = reason
            self._ended[reason] += 1


def _grouped(connections: Iterable[Connection], key: Callable[[Connection], str]) -> list[list[Connection]]:
    groups = defaultdict[str, list[Connection]](list)
    for connection in connections:
        groups[key(connection)].append(connection)
    return list(groups.values())


def _largest_first(groups: list[list[Connection]]) -> Iterator[list[Connection]]:
    """Yield the largest group repeatedly. A group from which the caller removes nothing is not yielded again."""
    heap = [(-len(group), number) for number, group in enumerate(groups)]
    heapify(heap)
    while heap:
        size, number = heappop(heap)
        yield groups[number]
        if 0 < len(groups[number]) < -size:
            heappush(heap, (-len(groups[number]), number))
