"""gRPC options that limit connections and unread data."""

import logging
import resource
from contextlib import suppress

from specpool.rpc.config.settings import ServerSettings
from specpool.rpc.server.calls import Rates

log = logging.getLogger(__name__)

# Bytes that gRPC buffers of an unread request, and of the next message of a stream.
UNREAD_BYTES = 16 * 2**10
# Larger metadata is refused before Python sees it. Tokens have at most 1 KiB.
MAX_METADATA_BYTES = 8 * 2**10
# Minimum number of calls that may wait to be accepted or refused.
MIN_PENDING_CALLS = 4096
# Calls of one connection. Clients wait with further ones.
MAX_STREAMS = 1024
# File descriptors besides client connections: files, connections to workers, event loops.
OTHER_DESCRIPTORS = 128


def connection_options(settings: ServerSettings, rates: Rates) -> list[tuple[str, int]]:
    """Return the gRPC options of a server that limit its connections."""
    pending = max(MIN_PENDING_CALLS, 2 * settings.max_calls)
    return [
        ("grpc.so_reuseport", 0),  # fail if another server uses the port
        # Close the streams of a vanished peer after this time.
        ("grpc.keepalive_time_ms", 20_000),
        ("grpc.keepalive_timeout_ms", 10_000),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
        ("grpc.max_allowed_incoming_connections", max_connections(settings.max_connections)),
        # Clients reconnect by themselves. Connections with open streams are not idle.
        ("grpc.max_connection_idle_ms", rates.idle_connection_seconds * 1000),
        ("grpc.server_handshake_timeout_ms", rates.handshake_seconds * 1000),
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


def max_connections(wanted: int) -> int:
    """Return the number of connections to allow: fewer than wanted if the process may open few descriptors."""
    usable = usable_descriptors(wanted)
    if usable < wanted:
        log.warning(
            "the limit on file descriptors allows only %d connections, not --max-connections %d; raise `ulimit -n`",
            usable, wanted,
        )  # fmt: skip
    return usable


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
