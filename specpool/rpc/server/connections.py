"""gRPC options that limit connections and unread data."""

import logging
import resource
from contextlib import suppress

from specpool.rpc.config.settings import ServerSettings

log = logging.getLogger(__name__)

# Bytes that gRPC buffers of an unread request, and of the next message of a stream.
UNREAD_BYTES = 16 * 2**10
IDLE_CONNECTION_SECONDS = 300
# Minimum number of calls that may wait to be accepted or refused.
MIN_PENDING_CALLS = 4096
HANDSHAKE_SECONDS = 10
# File descriptors besides client connections: files, connections to workers, event loops.
OTHER_DESCRIPTORS = 128


def connection_options(settings: ServerSettings) -> list[tuple[str, int]]:
    """Return the gRPC options of a server that limit its connections."""
    pending = max(MIN_PENDING_CALLS, 2 * settings.max_calls)
    per_connection = max(MIN_PENDING_CALLS, 2 * (settings.max_calls_per_client or settings.max_calls))
    return [
        ("grpc.max_allowed_incoming_connections", usable_connections(settings.max_connections)),
        # Clients reconnect by themselves. Connections with open streams are not idle.
        ("grpc.max_connection_idle_ms", IDLE_CONNECTION_SECONDS * 1000),
        ("grpc.server_handshake_timeout_ms", HANDSHAKE_SECONDS * 1000),
        # With bandwidth-scaled windows, every unread request could hold megabytes.
        ("grpc.http2.bdp_probe", 0),
        ("grpc.http2.lookahead_bytes", UNREAD_BYTES),
        ("grpc.max_concurrent_streams", per_connection),
        # Beyond the first limit, gRPC cancels pending calls at random. Keep it above `max_calls`, which gives a reason.
        ("grpc.server.max_pending_requests", pending),
        ("grpc.server.max_pending_requests_hard_limit", 2 * pending),
    ]


def usable_connections(max_connections: int) -> int:
    """Return how many connections the descriptor limit allows. Raises the soft limit if necessary."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = max_connections + OTHER_DESCRIPTORS
    if soft != resource.RLIM_INFINITY and soft < needed:
        wanted = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        with suppress(OSError, ValueError):  # macOS has further limits
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
            soft = wanted
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return max_connections
    usable = max(1, soft - OTHER_DESCRIPTORS)
    log.warning(
        "the limit of %d file descriptors allows only %d connections, not max_connections (%d); raise `ulimit -n`",
        soft, usable, max_connections,
    )  # fmt: skip
    return usable
