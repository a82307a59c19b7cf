"""Channels between Specpool's processes: their options, security, and the size of messages, in one place."""

from pathlib import Path
from typing import TypeAlias, TypedDict, Unpack

import grpc

from specpool.rpc.security.reloading import Reloaded
from specpool.rpc.security.tls import Pem, TlsFiles, channel_credentials
from specpool.rpc.security.tokens import bearing, token_of

StrPath: TypeAlias = str | Path

# A tokenizer (tens of MB for large vocabularies) is the largest message between processes.
MAX_WORKER_MESSAGE_BYTES = 128 * 2**20
# A worker receives rounds, which hold token ids; of prompts, no more than the coordinator's `prefill_tokens`.
MAX_ROUND_BYTES = 32 * 2**20

CHANNEL_OPTIONS: list[tuple[str, int | str]] = [
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


TLS_CHANNEL_OPTIONS: list[tuple[str, int | str]] = [
    # Also the time that an attempt to connect may take, including the handshake, which is slow on a busy machine.
    *(option for option in CHANNEL_OPTIONS if option[0] != "grpc.min_reconnect_backoff_ms"),
    ("grpc.min_reconnect_backoff_ms", 5_000),
]


def join_address(host: str, port: int) -> str:
    """`host:port`, with brackets around a host that has colons of its own."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


class SecurityOptions(TypedDict, total=False):
    """How a client secures its connections, and who it is. Files are read anew when they change."""

    tls_ca: StrPath | None
    """PEM file of the CA that has signed the server's certificate; with it, connections use TLS."""
    tls_cert: StrPath | None
    """PEM file of the client's own certificate, where the server asks for one (mutual TLS)."""
    tls_key: StrPath | None
    """PEM file of that certificate's key."""
    tls_name: str | None
    """Name that the server's certificate must have, if it is not the host of the address."""
    token: str | None
    """API token."""
    token_file: StrPath | None
    """File with the API token, instead of `token`."""


class Connector:
    """How to reach a server, again and again."""

    def __init__(self, address: str, **security: Unpack[SecurityOptions]) -> None:
        """`address`: "host:port". TypeError for an unknown option; ValueError, which names the option, for a file that
        cannot be used and for options that do not fit together."""
        if unknown := security.keys() - SecurityOptions.__annotations__.keys():
            raise TypeError(f"unknown option: {', '.join(sorted(unknown))}")
        ca, cert, key = _path(security.get("tls_ca")), _path(security.get("tls_cert")), _path(security.get("tls_key"))
        self.address = address
        self._token = token_of(security.get("token"), _path(security.get("token_file")))
        self._options = [*(CHANNEL_OPTIONS if ca is None else TLS_CHANNEL_OPTIONS)]
        if (name := security.get("tls_name")) is not None:
            self._options.append(("grpc.ssl_target_name_override", name))
        self._tls: Reloaded[Pem] | None = None
        if ca is not None:
            self._tls = TlsFiles(ca, cert, key).reloaded()
        elif given := [name for name in ("tls_cert", "tls_key", "tls_name") if security.get(name) is not None]:
            raise ValueError(f"{given[0]}: must be given with tls_ca")
        self._opened: Pem | None = None

    def open(self) -> grpc.aio.Channel:
        """A new channel. Opening never fails; calls fail while nobody listens there."""
        tls = self._next_tls()
        if tls is None:
            channel = grpc.aio.insecure_channel(self.address, options=self._options)
        else:
            channel = grpc.aio.secure_channel(self.address, channel_credentials(tls), options=self._options)
        return bearing(channel, self._token) if self._token is not None else channel

    def open_blocking(self) -> grpc.Channel:
        """A new channel for threads instead of asyncio."""
        tls = self._next_tls()
        if tls is None:
            channel = grpc.insecure_channel(self.address, options=self._options)
        else:
            channel = grpc.secure_channel(self.address, channel_credentials(tls), options=self._options)
        return bearing(channel, self._token) if self._token is not None else channel

    @property
    def is_outdated(self) -> bool:
        """Whether the TLS files have changed since the last channel was opened, and can be used. Tokens never make a
        channel outdated: each call sends the token of that moment."""
        return self._tls is not None and self._tls.current() != self._opened

    def _next_tls(self) -> Pem | None:
        if self._tls is not None:
            self._opened = self._tls.current()
        return self._opened


def open_channel(address: str) -> grpc.aio.Channel:
    """A channel to `address` ("host:port"), without TLS. Opening never fails; calls fail while nobody listens there."""
    return Connector(address).open()


def _path(given: StrPath | None) -> Path | None:
    return None if given is None else Path(given)
