"""gRPC channels between Specpool's processes: options, security and message size limits."""

import re
from ipaddress import IPv6Address
from pathlib import Path
from typing import Any, TypeAlias, TypedDict, Unpack

import grpc

from specpool.rpc.security.reloading import Reloaded
from specpool.rpc.security.tls import Pem, TlsFiles, channel_credentials
from specpool.rpc.security.tokens import bearing, token_of

StrPath: TypeAlias = str | Path

COORDINATOR_PORT, TARGET_WORKER_PORT, DRAFT_WORKER_PORT = 50050, 50051, 50052
"""Default ports."""
_PORT = re.compile(r":\d+$")
# Addresses of gRPC without ports: sockets and names that a service resolves.
_WITHOUT_PORT = re.compile(r"(unix|unix-abstract|vsock|xds):")

# Tokenizers are the largest messages: tens of MB for large vocabularies.
MAX_WORKER_MESSAGE_BYTES = 128 * 2**20
# Rounds hold token ids. Prompts are cut into chunks of the coordinator's `prefill_tokens`.
MAX_ROUND_BYTES = 32 * 2**20

CHANNEL_OPTIONS: list[tuple[str, int | str]] = [
    ("grpc.max_receive_message_length", MAX_WORKER_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_WORKER_MESSAGE_BYTES),
    # Detect a vanished peer within half a minute.
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    # Ignore http_proxy, which is meant for downloads.
    ("grpc.enable_http_proxy", 0),
    # Re-resolve names soon: they may point to another pod by now.
    ("grpc.dns_min_time_between_resolutions_ms", 2_000),
    # Reconnect quickly to a restarted peer.
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.min_reconnect_backoff_ms", 200),
    ("grpc.max_reconnect_backoff_ms", 2_000),
    # Do not share connections between channels.
    ("grpc.use_local_subchannel_pool", 1),
]


# The minimum backoff is also the connect timeout, and a TLS handshake is slow on a busy machine.
TLS_CHANNEL_OPTIONS = [*dict([*CHANNEL_OPTIONS, ("grpc.min_reconnect_backoff_ms", 5_000)]).items()]


def join_address(host: str, port: int) -> str:
    """Return `host:port`, with brackets around an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def check_address(address: str, port: int) -> str:
    """Return the address. Raises ValueError, with `port` as an example, if it has no port."""
    if _WITHOUT_PORT.match(address) or (_PORT.search(address) and not _is_ipv6(address)):
        return address
    host = address.rstrip(":").removeprefix("[").removesuffix("]")
    raise ValueError(f"{address} has no port: use HOST:PORT, such as {join_address(host, port)}")


def _is_ipv6(address: str) -> bool:
    try:
        return bool(IPv6Address(address))
    except ValueError:
        return False


class SecurityOptions(TypedDict, total=False):
    """Security and identity of a client. Files are reloaded when they change."""

    tls_ca: StrPath | None
    """PEM file of the CA that signed the server's certificate. Enables TLS."""
    tls_cert: StrPath | None
    """PEM file of the client's certificate, if the server requires one (mutual TLS)."""
    tls_key: StrPath | None
    """PEM file of the client certificate's key."""
    tls_name: str | None
    """Name in the server's certificate, if it differs from the host of the address."""
    token: str | None
    """API token."""
    token_file: StrPath | None
    """File with the API token; an alternative to `token`."""


class Connector:
    """Opens channels to a server."""

    def __init__(self, address: str, **security: Unpack[SecurityOptions]) -> None:
        """`address`: "host:port".

        Raises TypeError for unknown options, and ValueError with the option's name for unusable files or conflicting
        options.
        """
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
        """Open a channel. This never fails; calls fail while no server listens."""
        return self._open(grpc.aio)  # type: ignore[no-any-return]

    def open_blocking(self) -> grpc.Channel:
        """Open a channel for threads instead of asyncio."""
        return self._open(grpc)  # type: ignore[no-any-return]

    def _open(self, library: Any) -> Any:
        if self._tls is None:
            channel = library.insecure_channel(self.address, options=self._options)
        else:
            self._opened = self._tls.current()
            channel = library.secure_channel(self.address, channel_credentials(self._opened), options=self._options)
        return bearing(channel, self._token) if self._token is not None else channel

    @property
    def is_outdated(self) -> bool:
        """Whether usable TLS files have replaced those of the last channel. Tokens are read anew for each call."""
        return self._tls is not None and self._tls.current() != self._opened


def open_channel(address: str) -> grpc.aio.Channel:
    """Open a channel to `address` ("host:port") without TLS."""
    return Connector(address).open()


def _path(value: StrPath | None) -> Path | None:
    return None if value is None else Path(value)
