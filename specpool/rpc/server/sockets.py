"""The accepted connections of this process, found among its descriptors. gRPC does not expose them."""

import ctypes
import ipaddress
import os
import socket
import stat
import struct
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, TypeAlias
from urllib.parse import unquote

DESCRIPTORS = "/dev/fd"
"""Lists the descriptors of the process, on Linux and macOS."""
# Place of `tcpi_bytes_received` in Linux's `struct tcp_info`.
_RECEIVED = slice(128, 136)
_MAPPED = "::ffff:"

MAX_DISCARDS, DISCARD_BYTES = 64, 2**18
# Linux's options of a socket filter, and the program that drops every packet.
_ATTACH_FILTER, _DETACH_FILTER = 26, 27
_DROP_ALL = ctypes.create_string_buffer(struct.pack("HBBI", 6, 0, 0, 0))

Endpoint: TypeAlias = tuple[str, int]
"""Host and port."""


def descriptors() -> list[int]:
    return [int(name) for name in os.listdir(DESCRIPTORS)]


def inode_of(descriptor: int) -> int | None:
    """Return the number of a socket, 0 where sockets have none. None for other or closed descriptors."""
    try:
        status = os.fstat(descriptor)
    except OSError:
        return None
    return status.st_ino if stat.S_ISSOCK(status.st_mode) else None


@contextmanager
def borrowed(descriptor: int) -> Iterator[socket.socket | None]:
    """Yield a copy of a stream socket, or None for other or closed descriptors.

    A copy stays the same socket although another thread may close the descriptor and reuse its number.
    """
    copy = each = None
    with suppress(OSError):
        copy = os.dup(descriptor)
        each = socket.socket(socket.AF_INET6, socket.SOCK_STREAM, fileno=copy)  # names are read for any family
    try:
        yield each
    finally:
        if each is not None:
            each.close()
        elif copy is not None:
            os.close(copy)


def ends(connection: socket.socket) -> tuple[Endpoint, Endpoint] | None:
    """Return the local and the remote end of a TCP connection, or None for other sockets."""
    try:
        local, remote = _endpoint(connection.getsockname()), _endpoint(connection.getpeername())
    except OSError:  # not connected
        return None
    return None if local is None or remote is None else (local, remote)


def received(connection: socket.socket) -> int:
    """Return how many bytes a connection has received. 0 on systems that do not report it."""
    if not hasattr(socket, "TCP_INFO") or os.uname().sysname != "Linux":
        return 0
    with suppress(OSError):
        info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _RECEIVED.stop)
        if len(info) >= _RECEIVED.stop:
            return int.from_bytes(info[_RECEIVED], "little")
    return 0


def listening(each: socket.socket) -> Endpoint | None:
    """Return the local end of a socket that listens, or None for others."""
    with suppress(OSError):
        if each.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            return _endpoint(each.getsockname())
    return None


def stall(connection: socket.socket) -> bool:
    """Drop everything that a connection receives, so that its client's TCP slows down. Returns False if unsupported."""
    if sys.platform != "linux":
        return False
    try:
        program = struct.pack("HL", 1, ctypes.addressof(_DROP_ALL))
        connection.setsockopt(socket.SOL_SOCKET, _ATTACH_FILTER, program)
    except OSError:
        return False
    return True


def cut(connection: socket.socket) -> None:
    """Shut a connection down in both directions, and discard unread data. Otherwise its owner would still read it."""
    if sys.platform == "linux":
        with suppress(OSError):  # not stalled
            connection.setsockopt(socket.SOL_SOCKET, _DETACH_FILTER, 0)
    with suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
        for _ in range(MAX_DISCARDS):
            if not connection.recv(DISCARD_BYTES, socket.MSG_DONTWAIT):
                return


def endpoint_of(peer: str) -> Endpoint | None:
    """Return the endpoint of a gRPC peer such as "ipv4:10.0.0.1:5000" or "ipv6:%5B::1%5D:5000"."""
    kind, _, address = peer.partition(":")
    host, _, port = unquote(address).rpartition(":")
    if kind not in ("ipv4", "ipv6") or not port.isdecimal():
        return None
    return _plain(host.strip("[]")), int(port)


def network_of(host: str) -> str:
    """Return the address, for IPv6 its network of 64 bits: a host may use all of its addresses."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host
    return host if address.version == 4 else str(ipaddress.ip_network((int(address) >> 64 << 64, 64)))


def _endpoint(address: Any) -> Endpoint | None:
    """Return the endpoint of a socket's address, or None for other families, such as netlink."""
    match address:
        case (str(host), int(port), *_):
            return _plain(host), port
    return None


def _plain(host: str) -> str:
    """Return a host without its scope, and an IPv4 address in its own notation."""
    return host.partition("%")[0].removeprefix(_MAPPED)
