"""Bounds of a server's connections, and of what a client may send before it is read, as options of gRPC."""

import logging
import resource

from specpool.rpc.config.settings import ServerSettings

log = logging.getLogger(__name__)

# What gRPC holds of a request that is not read yet, and of each stream's next message.
UNREAD_BYTES = 16 * 2**10
IDLE_CONNECTION_SECONDS = 300
# Calls that may wait to be accepted or refused, however few may be in progress.
LEAST_PENDING = 4096
HANDSHAKE_SECONDS = 10
# Descriptors that are not connections of clients: files, connections to workers, event loops.
OTHER_DESCRIPTORS = 128


def connection_options(settings: ServerSettings) -> list[tuple[str, int]]:
    """Options of a server that bound its connections and what they may hold."""
    return [
        ("grpc.max_allowed_incoming_connections", usable_connections(settings.max_connections)),
        # A client reconnects by itself. Connections with open streams are not idle.
        ("grpc.max_connection_idle_ms", IDLE_CONNECTION_SECONDS * 1000),
        ("grpc.server_handshake_timeout_ms", HANDSHAKE_SECONDS * 1000),
        # Windows that grow with the bandwidth would let every unread request hold megabytes.
        ("grpc.http2.bdp_probe", 0),
        ("grpc.http2.lookahead_bytes", UNREAD_BYTES),
        ("grpc.max_concurrent_streams", max(LEAST_PENDING, 2 * (settings.max_calls_per_client or settings.max_calls))),
        # Once there are more than the first number of calls that the event loop has not accepted yet, gRPC cancels some
        # at random: many calls at once must all be accepted, or refused with a reason.
        ("grpc.server.max_pending_requests", max(LEAST_PENDING, 2 * settings.max_calls)),
        ("grpc.server.max_pending_requests_hard_limit", 2 * max(LEAST_PENDING, 2 * settings.max_calls)),
    ]


def usable_connections(wanted: int) -> int:
    """The number of connections, at most `wanted`, for which descriptors suffice; raises their soft limit if need
    be."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = wanted + OTHER_DESCRIPTORS
    if soft != resource.RLIM_INFINITY and soft < needed:
        soft = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return wanted
    usable = max(1, soft - OTHER_DESCRIPTORS)
    log.warning("the limit of %d descriptors allows %d connections, not max_connections (%d)", soft, usable, wanted)
    return usable
