"""gRPC channels between Specpool's processes: options, security and message size limits."""

import re
from ipaddress import IPv6Address
from pathlib import Path
from typing import Any, TypeAlias, TypedDict, Unpack

import grpc

from specpool.rpc.security.tls import Pem, Reloaded, TlsFiles, channel_credentials
from specpool.rpc.security.tokens import bearing, token_of

StrPath: TypeAlias = str | Path

COORDINATOR_PORT, TARGET_WORKER_PORT, DRAFT_WORKER_PORT = 50050, 50051, 50052
"""Default ports."""
FOLLOWED = "dns:///"
"""Prefix of a DNS name whose records are followed."""
_PORT = re.compile(r":(\d+)$")
# Addresses of gRPC without ports: sockets and names that a service resolves.
_WITHOUT_PORT = re.compile(r"(unix|unix-abstract|vsock|xds):")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,31}")
_URL = re.compile(r"https?://([^/]*)", re.IGNORECASE)
_HOST_AND_PORT = re.compile(r"(?:\[([^\s\[\]]+)\]|([^\s:/\[\]]+)):(\d+)")

# Tokenizers are the largest messages: tens of MB for large vocabularies.
MAX_WORKER_MESSAGE_BYTES = 128 * 2**20
# Rounds hold token ids. Prompts are cut into chunks of the coordinator's `prefill_tokens`.
MAX_ROUND_BYTES = 32 * 2**20

CONNECT_TIMEOUT = "grpc.min_reconnect_backoff_ms"
"""Also the timeout of each connection attempt."""
CHANNEL_OPTIONS: dict[str, int | str] = {
    "grpc.max_receive_message_length": MAX_WORKER_MESSAGE_BYTES,
    "grpc.max_send_message_length": MAX_WORKER_MESSAGE_BYTES,
    # Detect a vanished peer within half a minute.
    "grpc.keepalive_time_ms": 20_000,
    "grpc.keepalive_timeout_ms": 10_000,
    # Ignore http_proxy, which is meant for downloads.
    "grpc.enable_http_proxy": 0,
    # Re-resolve names soon: they may point to another pod by now.
    "grpc.dns_min_time_between_resolutions_ms": 2_000,
    # Reconnect quickly to a restarted peer.
    "grpc.initial_reconnect_backoff_ms": 200,
    CONNECT_TIMEOUT: 200,
    "grpc.max_reconnect_backoff_ms": 2_000,
    # Do not share connections between channels.
    "grpc.use_local_subchannel_pool": 1,
}
# A TLS handshake is slow on a busy machine.
TLS_CHANNEL_OPTIONS = CHANNEL_OPTIONS | {CONNECT_TIMEOUT: 5_000}


def join_address(host: str, port: int) -> str:
    """Return `host:port`, with brackets around an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def check_address(address: str, port: int) -> str:
    """Return the address. Raises ValueError, with `port` as an example, if it is a URL or has no valid port."""
    if (url := _URL.match(address)) is not None:
        host = url[1] if _PORT.search(url[1]) else join_address(url[1].strip("[]"), port)
        raise ValueError(f"{address} is a URL: use HOST:PORT, such as {host}")
    if _WITHOUT_PORT.match(address):
        return address
    if (given := _PORT.search(address)) is None or _is_ipv6(address):
        host = address.rstrip(":").removeprefix("[").removesuffix("]")
        raise ValueError(f"{address} has no port: use HOST:PORT, such as {join_address(host, port)}")
    if not _is_port(given[1]):
        raise ValueError(f"{address}: the port must be from 1 to 65535")
    return address


def check_addresses(addresses: str, port: int) -> str:
    """Return comma-separated addresses without spaces. Raises ValueError like `check_address`, and for duplicates."""
    checked = [check_address(address, port) for address in split_addresses(addresses)]
    if not checked:
        raise ValueError("no address is given")
    for address in checked:
        if checked.count(address) > 1:
            raise ValueError(f"{address} is listed twice")
    return ",".join(checked)


def check_named_addresses(addresses: str, port: int) -> str:
    """Like `check_addresses`, but entries may have names: NAME=ADDRESS."""
    entries = split_named(addresses)
    for name, address in entries:
        if address.startswith("=") or (name and not _NAME.fullmatch(name)):
            raise ValueError(f"invalid draft name {name!r}: use up to 32 letters, digits, '.', '_' and '-'")
        if "=" in address and "/" not in address:
            raise ValueError(f"invalid address {address}: use NAME=HOST:PORT")
    check_addresses(",".join(address for _, address in entries), port)
    return ",".join(f"{name}={address}" if name else address for name, address in entries)


def split_named(addresses: str) -> list[tuple[str, str]]:
    """Split a comma-separated list into names and addresses. Entries without a name get an empty one."""
    found: list[tuple[str, str]] = []
    for entry in split_addresses(addresses):
        name, _, address = entry.partition("=")
        is_named = bool(name and address) and not {":", "/"} & {*name}  # socket paths may contain "="
        found.append((name.strip(), address.strip()) if is_named else ("", entry))
    return found


def is_followed(address: str) -> bool:
    """Whether an address is a DNS name whose records are followed: "dns:///host:port"."""
    return address.startswith(FOLLOWED)


def split_addresses(addresses: str) -> list[str]:
    """Return the addresses of a comma-separated list."""
    return [address.strip() for address in addresses.split(",") if address.strip()]


def split_address(address: str) -> tuple[str, int] | None:
    """Return the host and the port of "host:port", or None for gRPC's other forms, such as "dns:///name:port"."""
    match = _HOST_AND_PORT.fullmatch(address)
    return (match[1] or match[2], int(match[3])) if match is not None and _is_port(match[3]) else None


def _is_port(digits: str) -> bool:
    return len(digits) <= 5 and 0 < int(digits) < 2**16


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
    def __init__(self, address: str, **security: Unpack[SecurityOptions]) -> None:
        """`address`: "host:port".

        Raises TypeError for unknown options, and ValueError with the option's name for unusable files or conflicting
        options.
        """
        if unknown := security.keys() - SecurityOptions.__annotations__.keys():
            raise TypeError(f"unknown option: {', '.join(sorted(unknown))}")
        ca, cert, key = _path(security.get("tls_ca")), _path(security.get("tls_cert")), _path(security.get("tls_key"))
        self.address, self.tls_name = address, security.get("tls_name")
        self._token = token_of(security.get("token"), _path(security.get("token_file")))
        self._options = CHANNEL_OPTIONS if ca is None else TLS_CHANNEL_OPTIONS
        if self.tls_name is not None:
            self._options = self._options | {"grpc.ssl_target_name_override": self.tls_name}
        self.tls_files: TlsFiles | None = None
        self._tls: Reloaded[Pem] | None = None
        if ca is not None:
            self.tls_files = TlsFiles(ca, cert, key)
            self._tls = self.tls_files.reloaded()
        elif given := [name for name in ("tls_cert", "tls_key", "tls_name") if security.get(name) is not None]:
            raise ValueError(f"{given[0]}: must be given with tls_ca")
        self._opened: Pem | None = None

    def open(self, connect_seconds: float | None = None) -> grpc.aio.Channel:
        """Open a channel. This never fails; calls fail while no server listens.

        `connect_seconds`: timeout of each connection attempt.
        """
        options = dict(self._options)
        if connect_seconds is not None:
            options[CONNECT_TIMEOUT] = int(1000 * connect_seconds)
        return self._open(grpc.aio, options)  # type: ignore[no-any-return]

    def open_blocking(self) -> grpc.Channel:
        """Open a channel for threads instead of asyncio."""
        return self._open(grpc, self._options)  # type: ignore[no-any-return]

    def _open(self, library: Any, options: dict[str, int | str]) -> Any:
        arguments = [*options.items()]
        if self._tls is None:
            channel = library.insecure_channel(self.address, options=arguments)
        else:
            self._opened = self._tls.current()
            channel = library.secure_channel(self.address, channel_credentials(self._opened), options=arguments)
        return bearing(channel, self._token) if self._token is not None else channel

    @property
    def is_outdated(self) -> bool:
        """Whether usable TLS files have replaced those of the last channel. Tokens are read anew for each call."""
        return self._tls is not None and self._tls.current() != self._opened


def _path(value: StrPath | None) -> Path | None:
    return None if value is None else Path(value)
