"""Ports to listen on, and errors that name the setting of a port that cannot be used."""

import asyncio
import errno
import os
import random
import socket
from ipaddress import ip_address

from specpool.rpc.security.channel import join_address

# Below the ports that Linux (32768-60999) and macOS (49152-65535) give to outgoing connections
UNASSIGNED_PORTS = range(20_000, 32_000)
PORT_CHECK_SECONDS, MAX_REFUSALS = 1.0, 3


class ListenError(OSError):
    """A process cannot listen; the message begins with the name of the setting."""

    def __init__(self, setting: str, host: str, port: int, cause: Exception) -> None:
        """`setting`: the setting of the port; replaced by the one of its host if that is to blame."""
        is_monitoring = setting in ("health_port", "metrics_port")
        reason, host_setting = str(cause), "monitoring_host" if is_monitoring else "host"
        if isinstance(cause, socket.gaierror):
            setting, reason = host_setting, str(cause.strerror)
        elif isinstance(cause, OSError) and cause.errno is not None:
            setting = host_setting if cause.errno == errno.EADDRNOTAVAIL else setting
            reason = os.strerror(cause.errno)  # without Python's addition
            if cause.errno in (errno.EADDRINUSE, errno.EACCES):
                reason += f"; give another --{setting.replace('_', '-')}"
        super().__init__(f"{setting.replace('_', '-')}: cannot listen on {join_address(host, port)}: {reason}")


def check_port(setting: str, host: str, port: int) -> None:
    """Raise ListenError if a port is in use or not allowed."""
    if (error := bind_error(host, port)) is not None:
        raise ListenError(setting, host, port, error)


def bind_error(host: str, port: int) -> OSError | None:
    """Listen on a port for a moment. Return the system's error, which gRPC does not pass on; None if it works."""
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        socket.create_server(address, family=family).close()
    except OSError as error:
        return error
    return None


def is_loopback(host: str) -> bool:
    """Return whether only this machine can reach a host, which must resolve."""
    *_, (address, *_) = socket.getaddrinfo(host, None)[0]
    return ip_address(address).is_loopback


async def wait_closed(host: str, port: int, check_seconds: float = PORT_CHECK_SECONDS) -> None:
    """Wait until a port refuses several connections in a row. A busy machine delays connections, but refuses none."""
    family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    refusals = 0
    while refusals < MAX_REFUSALS:
        await asyncio.sleep(check_seconds)
        refusals = refusals + 1 if await _is_refused(family, address, check_seconds) else 0


async def _is_refused(family: int, address: tuple[object, ...], seconds: float) -> bool:
    try:
        async with asyncio.timeout(seconds):
            with socket.socket(family, socket.SOCK_STREAM) as connection:
                connection.setblocking(False)
                await asyncio.get_running_loop().sock_connect(connection, address)
    except ConnectionRefusedError:
        return True
    except OSError:  # such as a timeout, or too many open files
        return False
    return False


def free_port(count: int = 1) -> int:
    """Return the first of `count` consecutive ports that are free on the loopback interface.

    The system does not give them to other sockets before the caller's process listens.
    """
    while True:
        first = random.SystemRandom().choice(UNASSIGNED_PORTS)
        if all(bind_error("127.0.0.1", port) is None for port in range(first, first + count)):
            return first
