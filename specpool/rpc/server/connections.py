"""gRPC options that limit connections and unread data."""

import logging
import resource
from contextlib import suppress
from dataclasses import dataclass
from typing import Self

from specpool.rpc.config.settings import ServerSettings

log = logging.getLogger(__name__)

# Bytes that gRPC buffers of an unread request, and of the next message of a stream.
UNREAD_BYTES = 16 * 2**10
# Larger metadata is refused before Python sees it. Tokens have at most 1 KiB.
MAX_METADATA_BYTES = 8 * 2**10
IDLE_CONNECTION_SECONDS = 300
# Minimum number of calls that may wait to be accepted or refused.
MIN_PENDING_CALLS = 4096
# Calls of one connection, including those that were reset and are not freed yet. Clients wait with further ones.
MAX_STREAMS = 1024
HANDSHAKE_SECONDS = 10
# File descriptors besides client connections: files, connections to workers, event loops.
OTHER_DESCRIPTORS = 128
# Connections without an authenticated call that gRPC lets in beyond `max_connections`.
MIN_NEWCOMERS, MAX_NEWCOMERS = 64, 1024


@dataclass(frozen=True)
class ConnectionLimits:
    """Limits on open connections."""

    clients: int
    """Connections of clients that have made an authenticated call."""
    newcomers: int
    """Room for further connections. gRPC closes those beyond."""

    @property
    def strangers(self) -> int:
        """Connections without an authenticated call that may stay."""
        return max(1, self.newcomers // 4)

    @property
    def strangers_per_network(self) -> int:
        return max(1, self.strangers // 2)

    @property
    def total(self) -> int:
        return self.clients + self.newcomers

    @classmethod
    def of(cls, settings: ServerSettings) -> Self:
        """Return the limits of a server. Fewer connections are allowed if the process may open few descriptors."""
        clients = settings.max_connections
        newcomers = min(MAX_NEWCOMERS, max(MIN_NEWCOMERS, clients))
        usable = usable_descriptors(clients + newcomers)
        if usable < clients:
            log.warning(
                "the limit on file descriptors allows only %d connections, not max_connections (%d); raise `ulimit -n`",
                usable, clients,
            )  # fmt: skip
        newcomers = min(newcomers, max(1, usable // 4, usable - clients))
        return cls(max(1, min(clients, usable - newcomers)), newcomers)


def connection_options(settings: ServerSettings, limits: ConnectionLimits) -> list[tuple[str, int]]:
    """Return the gRPC options of a server that limit its connections."""
    pending = max(MIN_PENDING_CALLS, 2 * settings.max_calls)
    return [
        ("grpc.max_allowed_incoming_connections", limits.total),
        # Clients reconnect by themselves. Connections with open streams are not idle.
        ("grpc.max_connection_idle_ms", IDLE_CONNECTION_SECONDS * 1000),
        ("grpc.server_handshake_timeout_ms", HANDSHAKE_SECONDS * 1000),
        ("grpc.max_metadata_size", MAX_METADATA_BYTES),
        ("grpc.absolute_max_metadata_size", MAX_METADATA_BYTES),
        # With bandwidth-scaled windows, every unread request could hold megabytes.
        ("grpc.http2.bdp_probe", 0),
        ("grpc.http2.lookahead_bytes", UNREAD_BYTES),
        ("grpc.max_concurrent_streams", MAX_STREAMS),
        # Beyond the first limit, gRPC cancels pending calls at random. Keep it above `max_calls`, which gives a reason.
        ("grpc.server.max_pending_requests", pending),
        ("grpc.server.max_pending_requests_hard_limit", 2 * pending),
    ]


def usable_descriptors(connections: int) -> int:
    """Return how many of these connections the descriptor limit allows. Raises the soft limit if necessary."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = connections + OTHER_DESCRIPTORS
    if soft != resource.RLIM_INFINITY and soft < needed:
        wanted = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        with suppress(OSError, ValueError):  # macOS has further limits
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
            soft = wanted
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return connections
    return max(1, soft - OTHER_DESCRIPTORS)
