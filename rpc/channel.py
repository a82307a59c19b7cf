"""Channels between Specpool's processes: their options, and the size of messages, in one place."""

from dataclasses import dataclass

import grpc

# A tokenizer (tens of MB for large vocabularies) is the largest message between processes.
MAX_WORKER_MESSAGE_BYTES = 128 * 2**20
# What a worker receives are rounds: token ids, of prompts no more than the coordinator's `prefill_tokens`.
MAX_ROUND_BYTES = 32 * 2**20

CHANNEL_OPTIONS = [
    ("grpc.max_receive_message_length", MAX_WORKER_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_WORKER_MESSAGE_BYTES),
    # A peer that vanished without a word is noticed within half a minute.
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    # A proxy meant for downloads must not stand between processes.
    ("grpc.enable_http_proxy", 0),
    # A name that now stands for another pod is looked up again soon.
    ("grpc.dns_min_time_between_resolutions_ms", 2_000),
    # Reconnect to a restarted peer soon.
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.min_reconnect_backoff_ms", 200),
    ("grpc.max_reconnect_backoff_ms", 2_000),
    # Every server has its own connection, also within one process.
    ("grpc.use_local_subchannel_pool", 1),
]


def join_address(host: str, port: int) -> str:
    """`host:port`, with brackets around a host that has colons of its own."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


@dataclass(frozen=True)
class Connector:
    """How to reach a server, again and again."""

    address: str

    def open(self) -> grpc.aio.Channel:
        """A new channel. Opening never fails; calls fail while nobody listens there."""
        return open_channel(self.address)


def open_channel(address: str) -> grpc.aio.Channel:
    """A channel to `address` ("host:port"). Opening never fails; calls fail while nobody listens there."""
    return grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS)


def open_blocking_channel(address: str) -> grpc.Channel:
    """A channel to `address` for threads instead of asyncio."""
    return grpc.insecure_channel(address, options=CHANNEL_OPTIONS)
