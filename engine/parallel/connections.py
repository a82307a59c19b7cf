"""Connections between rank 0 and the others. When one end closes, the other end notices: nobody waits for the dead."""

import contextlib
import logging
import os
import select
import socket
import threading
import time
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from typing import TypeVar

from pydantic import BaseModel

log = logging.getLogger(__name__)

# A host that is gone without a word is noticed after about 5 + 3 * 2 seconds.
KEEPALIVE = {socket.TCP_KEEPIDLE: 5, socket.TCP_KEEPINTVL: 2, socket.TCP_KEEPCNT: 3}
RETRY_SECONDS = 1.0

Message = TypeVar("Message", bound=BaseModel)


def send(connection: Connection, message: BaseModel) -> None:
    """Sends a message as JSON."""
    connection.send_bytes(message.model_dump_json().encode())


def receive(connection: Connection, kind: type[Message]) -> Message:
    """Waits for a message. EOFError: the other end is closed."""
    return kind.model_validate_json(connection.recv_bytes())


def watch(connections: Mapping[str, Connection], on_hangup: Callable[[str], None]) -> None:
    """Calls `on_hangup` with the name of the first connection whose other end closes, on a thread of its own."""

    def wait() -> None:
        poller = select.poll()
        names = {connection.fileno(): name for name, connection in connections.items()}
        for number in names:
            poller.register(number, select.POLLRDHUP)
        on_hangup(names[poller.poll()[0][0]])

    threading.Thread(target=wait, name="ranks", daemon=True).start()


def hang_up(connection: Connection) -> None:
    """Closes a connection, also while a thread watches it: what is polled stays open until it is shut down."""
    with socket.socket(fileno=os.dup(connection.fileno())) as link, contextlib.suppress(OSError):
        link.shutdown(socket.SHUT_RDWR)
    connection.close()


def listen(host: str, port: int) -> socket.socket:
    """Waits for ranks of other nodes. OSError; but a name that is not known yet is waited for."""
    while True:
        try:
            (family, *_, address), *_ = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
            return socket.create_server(address[:2], family=family)
        except socket.gaierror as error:
            log.warning("%s: %s; trying again", host, error)
            time.sleep(RETRY_SECONDS)


def accept(server: socket.socket) -> Connection:
    """The next connection."""
    return _kept_alive(server.accept()[0])


def connect(host: str, port: int) -> Connection:
    """Connects to rank 0, and waits until it listens."""
    while True:
        with contextlib.suppress(OSError):
            return _kept_alive(socket.create_connection((host, port)))
        time.sleep(RETRY_SECONDS)


def end_process(reason: str) -> None:
    """Ends this process at once, whatever its threads wait for."""
    log.error("%s: the process ends", reason)
    logging.shutdown()
    os._exit(1)


def _kept_alive(link: socket.socket) -> Connection:
    link.settimeout(None)
    link.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for option, value in KEEPALIVE.items():
        link.setsockopt(socket.IPPROTO_TCP, option, value)
    return Connection(link.detach())
